"""One readable stream out of many ranks."""

import random

from seeds import each

from argosy.supervise.output.lines import BULK, LINE_MAX, LogSource
from argosy.supervise.output.stream import PENDING_MAX, Merger, Out, Stream

TRACEBACK = b"""Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
  File "train.py", line 9, in main
    raise ValueError("no data")
ValueError: no data
"""


def everyone(size: int, stream: Stream, data: bytes, merger: Merger, now: float = 0.0) -> None:
    for rank in range(size):
        merger.feed(rank, stream, data, now)


def written(outs: list[Out], merger: Merger) -> bytes:
    return b"".join(merger.render(out, colour=False) for out in outs)


def drain(merger: Merger, now: float) -> list[Out]:
    """What comes out until nothing is pending."""
    outs = [out for step in range(200) for out in merger.due(now + 0.05 * step)]
    assert merger.due(now + 3600.0) == [], "the merger never rests"
    return outs


def lines_of(outs: list[Out], rank: int, stream: Stream) -> list[bytes]:
    return [line for out in outs if rank in out.ranks and out.stream == stream for line in out.text.split(b"\n")]


def test_a_line_of_all_ranks_is_one_line_and_comes_at_once():
    merger = Merger(64)
    everyone(64, "stdout", b"ready\n", merger)
    assert written(merger.due(0.0), merger) == b"[0-63]  ready\n"
    assert merger.due(3600.0) == []


def test_one_rank_that_differs_is_shown_apart():
    merger = Merger(64)
    for rank in range(64):
        merger.feed(rank, "stdout", b"device cpu\n" if rank == 5 else b"device cuda\n", 0.0)
    assert merger.due(0.1) == []
    assert written(merger.due(0.2), merger) == b"[0-4,6-63] device cuda\n[5]     device cpu\n"


def test_a_line_waits_for_the_window_and_no_longer():
    merger = Merger(4, window_s=0.15)
    merger.feed(0, "stdout", b"loss 1.0\n", 10.0)
    assert merger.due(10.1) == []
    assert merger.due(10.149) == []
    assert [out.text for out in merger.due(10.15)] == [b"loss 1.0"]


def test_nobody_waits_for_a_rank_that_ended():
    merger = Merger(3)
    merger.close(2, 0.0)
    merger.feed(0, "stdout", b"done\n", 0.0)
    merger.feed(1, "stdout", b"done\n", 0.0)
    assert merger.due(0.0) == [Out("stdout", frozenset({0, 1}), b"done")]


def test_a_rank_that_lives_again_is_waited_for():
    merger = Merger(2)
    merger.close(1, 0.0)
    merger.feed(1, "stdout", b"back\n", 1.0)
    merger.feed(0, "stdout", b"hello\n", 1.0)
    assert merger.due(1.0) == []
    merger.feed(0, "stdout", b"back\n", 1.0)
    assert merger.due(1.0) == [
        Out("stdout", frozenset({0}), b"hello"),
        Out("stdout", frozenset({0, 1}), b"back"),
    ]


def test_a_line_that_nobody_else_can_say_does_not_hold_up_the_next():
    merger = Merger(8)
    merger.feed(0, "stdout", b"only rank 0\n", 0.0)
    everyone(8, "stdout", b"all\n", merger)
    assert [out.text for out in merger.due(0.0)] == [b"only rank 0", b"all"]


def test_repeated_lines_collapse_one_by_one():
    merger = Merger(3)
    everyone(3, "stdout", b"a\na\nb\na\n", merger)
    assert written(merger.due(0.0), merger) == b"[0-2] a\n[0-2] a\n[0-2] b\n[0-2] a\n"


def test_lines_that_all_share_collapse_around_lines_of_their_own():
    merger = Merger(3)
    for rank in range(3):
        merger.feed(rank, "stdout", b"begin\nI am %d\nready\n" % rank, 0.0)
    assert written(merger.due(0.0), merger) == (b"[0-2] begin\n[0]   I am 0\n[1]   I am 1\n[2]   I am 2\n[0-2] ready\n")


def test_lines_in_opposite_orders_keep_the_order_of_each_rank():
    merger = Merger(2)
    merger.feed(0, "stdout", b"a\nb\n", 0.0)
    merger.feed(1, "stdout", b"b\na\n", 0.0)
    outs = drain(merger, 0.0)
    assert [lines_of(outs, rank, "stdout") for rank in (0, 1)] == [[b"a", b"b"], [b"b", b"a"]]
    assert len(outs) == 3


def test_streams_do_not_mix():
    merger = Merger(2)
    merger.feed(0, "stdout", b"x\n", 0.0)
    merger.feed(1, "stderr", b"x\n", 0.0)
    assert {(out.stream, out.ranks) for out in merger.due(1.0)} == {
        ("stdout", frozenset({0})),
        ("stderr", frozenset({1})),
    }


def test_a_traceback_amid_the_output_of_others_is_contiguous():
    merger = Merger(8)
    outs: list[Out] = []
    for step, start in enumerate(range(0, len(TRACEBACK), 7)):
        now = step * 0.001
        merger.feed(3, "stderr", TRACEBACK[start : start + 7], now)
        for rank in range(8):
            merger.feed(rank, "stderr", b"warning %d\n" % step if rank != 3 else b"", now)
            merger.feed(rank, "stdout", b"step %d\n" % step, now)
        outs += merger.due(now)
    outs += drain(merger, 0.2)
    assert Out("stderr", frozenset({3}), TRACEBACK.rstrip()) in outs


def test_equal_tracebacks_do_not_collapse():
    merger = Merger(4)
    everyone(4, "stderr", TRACEBACK, merger)
    assert drain(merger, 0.0) == [Out("stderr", frozenset({r}), TRACEBACK.rstrip()) for r in range(4)]


def test_chained_exceptions_are_one_piece():
    merger = Merger(4)
    link = b"\nDuring handling of the above exception, another exception occurred:\n\n"
    merger.feed(1, "stderr", TRACEBACK, 0.0)
    merger.feed(1, "stderr", link, 0.01)
    merger.feed(1, "stderr", TRACEBACK, 0.02)
    assert [out.text for out in drain(merger, 0.02)] == [(TRACEBACK + link + TRACEBACK).rstrip()]


def test_a_traceback_behind_torchs_rank_prefix_is_one_piece():
    text = b"".join(b"[rank2]: %s\n" % line for line in TRACEBACK.splitlines())
    merger = Merger(4)
    merger.feed(2, "stderr", text + b"[rank2]: and why\n", 0.0)
    assert [out.text for out in drain(merger, 0.0)] == [text + b"[rank2]: and why"]


def test_an_exception_group_is_one_piece():
    text = b"""  + Exception Group Traceback (most recent call last):
  |   File "x.py", line 1, in <module>
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +---------------- 2 ----------------
    | TypeError: 2
    +------------------------------------
"""
    merger = Merger(2)
    merger.feed(0, "stderr", text, 0.0)
    assert [out.text for out in drain(merger, 0.0)] == [text.rstrip(b"\n")]


def test_a_syntax_error_is_one_piece():
    text = b'  File "/x/train.py", line 3\n    x = = 3\n        ^\nSyntaxError: invalid syntax\n'
    merger = Merger(2)
    everyone(2, "stderr", text, merger)
    assert [out.text for out in drain(merger, 0.0)] == [text.rstrip()] * 2


def test_a_traceback_comes_at_once_behind_what_its_rank_said():
    merger = Merger(4)
    merger.feed(1, "stderr", b"about to fail\n", 0.0)
    merger.feed(1, "stderr", TRACEBACK, 0.0)
    merger.close(1, 0.0)
    assert [out.text for out in merger.due(0.0)] == [b"about to fail", TRACEBACK.rstrip()]


def test_equal_lines_of_stderr_collapse_as_those_of_stdout_do():
    merger = Merger(3)
    everyone(3, "stderr", b"train.py: error: unrecognized arguments: --x\n", merger)
    assert [len(out.ranks) for out in drain(merger, 0.0)] == [3]


def test_the_last_line_of_a_crashed_rank_arrives_without_its_newline():
    merger = Merger(4)
    merger.feed(2, "stdout", b"step 1\nstep 2 at", 0.0)
    merger.feed(2, "stderr", b"Segmenta", 0.0)
    merger.close(2, 0.01)
    outs = drain(merger, 0.01)
    assert lines_of(outs, 2, "stdout") == [b"step 1", b"step 2 at"]
    assert lines_of(outs, 2, "stderr") == [b"Segmenta"]


def test_a_traceback_cut_short_by_death_arrives():
    merger = Merger(4)
    merger.feed(2, "stderr", TRACEBACK[:-9], 0.0)
    merger.close(2, 0.0)
    assert merger.due(0.0) == [Out("stderr", frozenset({2}), TRACEBACK[:-9])]


def test_an_unfinished_line_of_a_silent_rank_is_shown():
    merger = Merger(2)
    merger.feed(0, "stdout", b"waiting for peers...", 0.0)
    assert merger.due(0.9) == []
    assert [out.text for out in drain(merger, 0.9)] == [b"waiting for peers..."]
    merger.feed(0, "stdout", b" done\n", 5.0)
    assert [out.text for out in drain(merger, 5.0)] == [b" done"]


def test_a_progress_bar_is_shown_once_a_second_and_at_its_end():
    merger = Merger(4)
    outs: list[Out] = []
    for percent in range(100):
        merger.feed(0, "stderr", b"\r%3d%% \xe2\x96\x88" % percent, percent * 0.1)
        outs += merger.due(percent * 0.1)
    merger.feed(0, "stderr", b"\r100%\nnext\n", 10.0)
    outs += drain(merger, 10.0)
    texts = [out.text for out in outs]
    assert 8 <= len(texts) <= 13
    assert texts[-2:] == [b"100%", b"next"]
    assert not any(b"\r" in text for text in texts)


def test_a_slow_progress_bar_is_shown_and_not_repeated():
    merger = Merger(4)
    merger.feed(0, "stderr", b"\r 10%\r 20%", 0.0)
    assert [out.text for out in drain(merger, 0.0)] == [b" 10%", b" 20%"]
    merger.feed(0, "stderr", b"\n", 9.0)
    assert drain(merger, 9.0) == []


def test_windows_line_ends_are_line_ends():
    merger = Merger(2)
    everyone(2, "stdout", b"one\r\ntwo\r", merger)
    everyone(2, "stdout", b"\nthree\r\n", merger)
    assert [out.text for out in drain(merger, 0.0)] == [b"one", b"two", b"three"]


def test_bytes_that_are_no_text_pass():
    line = bytes(set(range(256)) - {10, 13})
    merger = Merger(2)
    everyone(2, "stdout", line + b"\n", merger)
    assert merger.due(0.0) == [Out("stdout", frozenset({0, 1}), line)]


def test_a_long_line_is_split_between_characters():
    line = "é".encode() * LINE_MAX
    merger = Merger(2)
    merger.feed(0, "stdout", b"x" + line + b"\n", 0.0)
    parts = lines_of(drain(merger, 0.0), 0, "stdout")
    assert b"".join(parts) == b"x" + line
    assert max(map(len, parts)) <= LINE_MAX
    assert all(part.decode() for part in parts)


def test_one_rank_passes_raw_and_at_once():
    merger = Merger(1, prefix=False)
    data = b"\r 10%\r 20%\x1b[31m\xff no newline"
    merger.feed(0, "stdout", data, 0.0)
    assert written(merger.due(0.0), merger) == data


def test_labels_keep_their_column():
    merger = Merger(100)
    widths = {
        len(merger.render(Out("stdout", frozenset(ranks), b""), colour=False))
        for ranks in ([3], [10], [99], range(100), range(10, 100))
    }
    assert len(widths) == 1


def test_a_label_of_scattered_ranks_is_short_and_says_how_many():
    merger = Merger(64)
    label = merger.render(Out("stdout", frozenset(range(0, 64, 2)), b""), colour=False)
    assert label == b"[0,2,4,6,8,10,12,14,... 32 ranks] \n"


def test_colour_is_on_the_label_and_closed_after_the_line():
    merger = Merger(2)
    assert merger.render(Out("stdout", frozenset({0}), b"\x1b[31mred"), colour=True) == (
        b"\x1b[36m[0]  \x1b[0m \x1b[31mred\x1b[0m\n"
    )


def test_s4_pending_lines_are_bounded():
    merger = Merger(64)
    for number in range(2000):
        merger.feed(0, "stdout", b"%08d" % number + b"x" * 8000 + b"\n", 0.0)
    held = sum(len(out.text) for out in merger.due(0.0))
    assert 2000 * 8008 - held <= PENDING_MAX


def test_a_flood_passes_whole_and_its_last_traceback_stays_in_one_piece():
    merger = Merger(4)
    flood = b"".join(b"line %d\n" % n for n in range(BULK // 4))
    merger.feed(1, "stderr", b"begun ", 0.0)
    merger.feed(1, "stderr", flood + TRACEBACK[:50], 0.0)
    merger.feed(1, "stderr", TRACEBACK[50:], 0.0)
    outs = drain(merger, 0.0)
    assert [out.text for out in outs] == [b"begun " + flood[:-1], TRACEBACK[:-1]]


def some_text(random_: random.Random) -> bytes:
    parts: list[bytes] = []
    for _ in range(random_.randrange(30)):
        kind = random_.randrange(12)
        if kind == 0:
            parts.append(TRACEBACK)
        elif kind == 1:
            parts.append(b"ERROR: %d\n" % random_.randrange(3))
        elif kind == 2:
            parts.append(random_.choice([b"", b"x", b"\xff\xfe", b"\xc3\xa9" * 9000]) + b"\n")
        elif kind == 3 and random_.random() < 0.1:
            parts.append((b"flood" * 20 + b"\n") * (BULK // 50))
        else:
            parts.append(b"line %d\n" % random_.randrange(6))
    return b"".join(parts)


@each("seed", range(60))
def test_s1_nothing_is_lost_doubled_or_reordered(seed: int):
    """Random texts, cut anywhere, fed in any interleaving, ranks ending at any time."""
    random_ = random.Random(seed)
    size = random_.choice([1, 2, 5, 16])
    keys: list[tuple[int, Stream]] = [(r, s) for r in range(size) for s in ("stdout", "stderr")]
    shared = some_text(random_)
    texts = {key: shared if random_.random() < 0.6 else some_text(random_) for key in keys}
    merger, outs, now = Merger(size), list[Out](), 0.0
    left = {key: text for key, text in texts.items() if text}
    while left:
        key = random_.choice(list(left))
        take = random_.choice([1, 3, 20, 100, 5000, 10**6])
        merger.feed(*key, left[key][:take], now)
        left[key] = left[key][take:]
        if not left[key]:
            del left[key]
            if random_.random() < 0.5 and not any(other[0] == key[0] for other in left):
                merger.close(key[0], now)
        now += random_.choice([0, 0, 0.001, 0.04])
        if random_.random() < 0.3:
            outs += merger.due(now)
    for rank in range(size):
        merger.close(rank, now)
    outs += drain(merger, now)
    for key, text in texts.items():
        # Long lines are split, so only the bytes between line ends are compared.
        assert b"".join(lines_of(outs, *key)) == text.replace(b"\n", b"")
    assert all(len(out.ranks) == 1 for out in outs if b"Traceback (most recent call last)" in out.text)


@each("seed", range(60))
def test_every_chunking_gives_the_same_lines(seed: int):
    random_ = random.Random(seed)
    text = some_text(random_) + b"  \r 1%\r 2%\r\n" + some_text(random_) + b"end"
    whole = LogSource(rewrite_s=1e9)
    cut = LogSource(rewrite_s=1e9)
    first = whole.feed(text, 0.0) + whole.close(0.0)
    second = []
    position = 0
    while position < len(text):
        take = random_.choice([1, 2, 50, 3000])
        second += cut.feed(text[position : position + take], 0.0)
        position += take
    second += cut.close(0.0)
    assert b"\n".join(p.text for p in first) == b"\n".join(p.text for p in second)


def test_long_chunks_of_like_lines_collapse_too():
    text = b"".join(b"line %d\n" % number for number in range(5000))
    merger = Merger(2, prefix=True)
    for rank in (0, 1):
        merger.feed(rank, "stdout", b"", 0.0)
    merger.feed_all([(0, "stdout", text), (1, "stdout", text)], 0.0)
    outs = merger.due(0.0)
    assert {out.ranks for out in outs} == {frozenset((0, 1))}
    assert b"\n".join(out.text for out in outs) + b"\n" == text
