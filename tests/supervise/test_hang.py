"""Who hangs, decided from progress alone, then judged with stacks."""

import msgspec
import pytest

from argosy.control.hang_suspect import GroupView, HangPolicy, Healthy, RankView, Suspect, decide_hang, decide_hang_end
from argosy.core import WaitStatus
from argosy.observe import GroupProgress, Phase, RankProgress
from argosy.supervise.evidence.frames import Frame, Stack, Thread
from argosy.supervise.evidence.hang_samples import HangWatch, Tracker
from argosy.supervise.evidence.hang_verdict import Busy, Hang, judge
from argosy.supervise.evidence.proc_sample import ProcSample

POLICY = HangPolicy()
TORCH = "/venv/lib/python3.11/site-packages/torch"


def rank(index: int, issued: int = 12, *, waiting: bool = True, op: str = "all_reduce", **more: object) -> RankView:
    group = GroupView("0", 4, issued, waiting=waiting, op=op, site="train.py:77")
    return msgspec.structs.replace(RankView(index=index, changed_at=0.0, steps=11, groups=(group,)), **more)


def at(*frames: tuple[str, int, str], proc: ProcSample | None = None) -> Stack:
    return Stack("faulthandler", (Thread("MainThread", tuple(Frame(*f) for f in frames), True),), proc)


IN_DATA = at(("/project/data.py", 41, "load"), ("/project/train.py", 9, "<module>"))
IN_REDUCE = at((f"{TORCH}/distributed/c10d.py", 3, "all_reduce"), ("/project/train.py", 77, "step"))


def suspect(views: list[RankView], now: float = 31.0, policy: HangPolicy = POLICY) -> Suspect:
    decision = decide_hang(views, policy, now)
    assert isinstance(decision, Suspect), decision
    return decision


def hang(views: list[RankView], stacks: dict[int, Stack] | None = None) -> Hang:
    verdict = judge(suspect(views), stacks or {})
    assert isinstance(verdict, Hang), verdict
    return verdict


def test_the_rank_that_skipped_an_all_reduce_is_named():
    views = [rank(0), rank(1), rank(2), rank(3, 11, waiting=False)]
    verdict = hang(views, {0: IN_REDUCE, 1: IN_REDUCE, 2: IN_REDUCE, 3: IN_DATA})
    assert verdict.headline == "ranks 0-2 wait in all_reduce #12; rank 3 at data.py:41"
    assert verdict.culprits == (3,)
    assert verdict.kind == "elsewhere"
    assert "rank 3: data.py:41 in load" in verdict.details


def test_nobody_is_suspected_before_the_threshold():
    assert decide_hang([rank(0), rank(1, 11, waiting=False)], POLICY, 29.0) == Healthy()


def test_a_slow_rhythm_lengthens_the_threshold():
    views = [rank(0, interval_s=60.0), rank(1, 11, waiting=False, interval_s=60.0)]
    assert decide_hang(views, POLICY, 599.0) == Healthy()
    assert suspect(views, 601.0).culprits[0].index == 1


def test_h1_a_rank_that_still_moves_is_no_hang():
    views = [rank(0), rank(1), rank(2), rank(3, 11, waiting=False, changed_at=40.0)]
    assert decide_hang(views, POLICY, 50.0) == Healthy("rank 3 still moves")


def test_ranks_that_only_start_are_left_alone():
    starting = RankView(index=0, changed_at=0.0, starting=True)
    few = rank(1, 2, waiting=True, steps=2)
    assert decide_hang([starting], POLICY, 500.0) == Healthy()
    assert decide_hang([few], POLICY, 500.0) == Healthy()


def test_a_rank_is_judged_once_its_peers_have_begun():
    views = [rank(0, 3), rank(1, 2, waiting=False, steps=0)]
    assert suspect(views).stuck == (0, 1)


def test_h3_blame_follows_the_waits_to_their_end():
    dp = GroupView("dp", 2, 5, waiting=True, op="all_reduce")
    behind = msgspec.structs.replace(dp, issued=4, waiting=False)
    tp = GroupView("tp", 2, 9, waiting=True, op="all_gather")
    late = msgspec.structs.replace(tp, issued=8, waiting=False)
    views = [
        RankView(index=0, changed_at=0.0, groups=(dp,)),
        RankView(index=1, changed_at=0.0, groups=(behind, tp)),
        RankView(index=2, changed_at=0.0, groups=(late,)),
    ]
    verdict = hang(views, {2: IN_DATA})
    assert verdict.culprits == (2,)
    assert verdict.headline == "rank 0 waits in all_reduce #5; rank 1 waits in all_gather #9; rank 2 at data.py:41"


def test_a_stopped_rank_is_named_as_stopped():
    views = [rank(0), rank(1, 11, waiting=False, state="T"), rank(2), rank(3)]
    verdict = hang(views)
    assert verdict.headline == "rank 1 is stopped (SIGSTOP); ranks 0,2-3 wait for it in all_reduce #12"
    assert verdict.kind == "stopped"


def test_a_stopped_rank_is_named_even_before_its_first_step():
    assert hang([RankView(index=0, changed_at=0.0, state="T", starting=True)]).headline == (
        "rank 0 is stopped (SIGSTOP)"
    )


def test_a_rank_under_a_debugger_is_no_hang():
    assert decide_hang([rank(0, waiting=False, state="t")], POLICY, 999.0) == Healthy()


def test_h5_while_a_rank_is_at_a_breakpoint_nobody_hangs():
    views = [rank(0), rank(1), rank(2, issued=11, waiting=False, debugged=True)]
    assert isinstance(decide_hang(views, POLICY, 1000.0), Healthy)


def test_an_early_exit_holds_up_the_others():
    views = [
        rank(0, 4, op="barrier"),
        rank(1, 4, op="barrier"),
        rank(2, 3, waiting=False, exited=WaitStatus(code=0)),
        rank(3, 4, op="barrier"),
    ]
    assert hang(views).headline == "rank 2 exited with code 0; ranks 0-1,3 wait for it in barrier #4"


def test_a_rank_in_the_kernel_is_named_with_its_wait_channel():
    proc = ProcSample("D", 1, 1, 1, wchan="nfs_wait")
    verdict = hang([rank(0), rank(1, 11, waiting=False, state="D")], {1: Stack("proc", proc=proc)})
    assert verdict.headline.endswith("rank 1 is in an uninterruptible system call (nfs_wait)")
    assert verdict.kind == "blocked"


def test_a_spinning_rank_is_told_from_a_sleeping_one():
    verdict = hang([rank(0), rank(1, 11, waiting=False, cpu_share=0.98)], {1: IN_DATA})
    assert verdict.headline == "rank 0 waits in all_reduce #12; rank 1 spins at data.py:41"


def test_different_collectives_of_the_same_number_are_shown():
    verdict = hang([rank(0), rank(1), rank(2, op="broadcast")])
    assert verdict.headline == "ranks 0-1 wait in all_reduce #12; rank 2 waits in broadcast #12"
    assert verdict.kind == "collective"


def test_a_collective_that_all_have_entered_is_said_to_be():
    assert hang([rank(0), rank(1)]).headline == "ranks 0-1 wait in all_reduce #12; all have entered it"


def test_a_member_that_never_used_the_group_is_absent():
    group = GroupView("tp", 2, 5, waiting=True, op="all_gather", members=range(0, 4, 2))
    views = [
        RankView(index=0, changed_at=0.0, groups=(group,)),
        RankView(index=1, changed_at=0.0),
        RankView(index=2, changed_at=0.0, steps=9),
    ]
    assert suspect(views).waits[0].absent == (2,)


def test_a_wait_inside_backward_is_seen_in_the_stacks():
    quiet = [RankView(index=i, changed_at=0.0, steps=9) for i in range(4)]
    backward = at((f"{TORCH}/autograd/graph.py", 9, "_engine_run_backward"), ("/project/train.py", 50, "step"))
    verdict = hang(quiet, {0: backward, 1: backward, 2: backward, 3: IN_DATA})
    assert verdict.headline == "ranks 0-2 wait in backward; rank 3 at data.py:41"


@pytest.mark.parametrize(
    ("file", "doing"),
    [
        ("/torch/_dynamo/convert_frame.py", "compiles"),
        ("/torch/_inductor/compile_fx.py", "compiles"),
        ("/torch/distributed/checkpoint/filesystem.py", "saves or loads a checkpoint"),
        ("/torch/serialization.py", "saves or loads a checkpoint"),
    ],
)
def test_a_rank_that_compiles_or_saves_is_busy(file: str, doing: str):
    stack = at(("/x/lib/python3.11/subprocess.py", 1, "wait"), (f"/s/site-packages{file}", 5, "f"))
    views = [rank(0), rank(1, 11, waiting=False)]
    assert judge(suspect(views, 31.0), {1: stack}) == Busy(f"rank 1 {doing}", 62.0)
    endless = judge(suspect(views, 2000.0), {1: stack})
    assert isinstance(endless, Hang), "no excuse lasts for ever"


def test_a_rank_that_imports_a_package_is_busy_and_one_whose_script_is_a_module_is_not():
    views = [rank(0), rank(1, 11, waiting=False)]
    importing = at(
        ("<frozen importlib._bootstrap_external>", 1130, "get_data"),
        (f"{TORCH}/_dynamo/__init__.py", 13, "<module>"),
        (f"{TORCH}/__init__.py", 2900, "compile"),
        ("/project/train.py", 16, "<module>"),
    )
    assert judge(suspect(views, 31.0), {1: importing}) == Busy("rank 1 imports a package", 62.0)
    assert isinstance(judge(suspect(views, 31.0), {1: at(("/project/train.py", 16, "<module>"))}), Hang)


def test_backward_that_compiles_on_a_thread_of_its_own_is_busy():
    main = Thread("MainThread", (Frame(f"{TORCH}/autograd/graph.py", 9, "_engine_run_backward"),), True)
    engine = Thread("0x7f", (Frame(f"{TORCH}/_inductor/compile_fx.py", 9, "bw_compiler"),))
    verdict = judge(suspect([rank(0), rank(1, 11, waiting=False)]), {1: Stack("faulthandler", (engine, main))})
    assert isinstance(verdict, Busy)


def test_a_rank_that_was_stopped_while_it_compiled_is_stopped():
    stack = at((f"{TORCH}/_inductor/compile_fx.py", 9, "compile_fx"))
    assert hang([rank(0), rank(1, 11, waiting=False, state="T")], {1: stack}).kind == "stopped"


def test_a_compiled_model_that_runs_is_not_compiling():
    stack = at(
        (f"{TORCH}/_inductor/output_code.py", 763, "__call__"),
        (f"{TORCH}/_functorch/aot_autograd.py", 1277, "forward"),
        (f"{TORCH}/_dynamo/eval_frame.py", 1166, "compile_wrapper"),
        ("/project/train.py", 16, "step"),
    )
    assert hang([rank(0), rank(1, 11, waiting=False)], {1: stack}).headline.endswith("rank 1 at train.py:16")


def page(*, steps: int = 0, pulse: int = 0, issued: int = 0) -> RankProgress:
    groups = (GroupProgress("0", 2, issued, op="all_reduce", stride=1),) if issued else ()
    return RankProgress(pid=1, phase=Phase.USER, steps=steps, pulse=pulse, groups=groups)


def samples(tracker: Tracker, index: int, pages: list[RankProgress], *, every_s: float, start: float = 0.0) -> float:
    now = start
    for progress in pages:
        now += every_s
        tracker.update(index, progress, ProcSample("S", 0, 1, 1), now)
    return now


def test_the_tracker_learns_a_rhythm_and_when_it_stopped():
    tracker = Tracker()
    now = samples(tracker, 0, [page(steps=n) for n in range(1, 9)], every_s=5.0)
    samples(tracker, 0, [page(steps=8)] * 4, every_s=0.25, start=now)
    (view,) = tracker.views()
    assert (view.changed_at, view.interval_s, view.steps) == (now, 5.0, 8)


def test_a_long_step_with_a_burst_of_collectives_keeps_the_rhythm_of_its_steps():
    tracker = Tracker()
    now = 0.0
    for step in range(1, 6):
        for burst in range(4):
            tracker.update(0, page(steps=step - 1, issued=step * 4 + burst), None, now + burst)
        now += 60.0
        tracker.update(0, page(steps=step, issued=step * 4 + 3), None, now)
    assert tracker.views()[0].interval_s == 60.0


def test_the_pulse_of_an_evaluation_counts_as_movement():
    tracker = Tracker()
    tracker.update(0, page(steps=5, pulse=1), None, 0.0)
    tracker.update(0, page(steps=5, pulse=2), None, 100.0)
    assert tracker.views()[0].changed_at == 100.0


def test_cpu_share_comes_from_ticks():
    tracker = Tracker()
    for quarter in range(40):
        tracker.update(0, None, ProcSample("R", quarter * 25, 1, 1), quarter * 0.25)
    assert 0.9 < tracker.views()[0].cpu_share < 1.1


def test_a_new_process_forgets_its_predecessor():
    tracker = Tracker()
    tracker.update(0, page(steps=50), None, 0.0)
    tracker.exited(0, WaitStatus(code=1))
    tracker.started(0, 9.0)
    assert tracker.views() == [RankView(index=0, changed_at=9.0, starting=True)]


def test_the_watch_reports_a_silence_once_and_the_next_one_again():
    watch = HangWatch(POLICY)
    silent = [rank(0), rank(1, 11, waiting=False)]
    assert watch.look(silent, 10.0) is None
    assert watch.look(silent, 31.0) is not None
    watch.answer(Hang("h", "elsewhere", (1,)))
    assert watch.look(silent, 500.0) is None
    again = [rank(0, 13, changed_at=600.0), rank(1, 12, waiting=False, changed_at=600.0)]
    assert watch.look(again, 610.0) is None
    assert watch.look(again, 631.0) is not None


def test_a_rank_that_moves_while_its_stack_is_taken_went_on():
    watch = HangWatch(POLICY)
    silent = [rank(0), rank(1, 11, waiting=False)]
    assert watch.look(silent, 31.0) is not None
    assert not watch.went_on(silent)
    assert watch.went_on([silent[0], rank(1, 12, changed_at=31.5)])


def test_the_watch_doubles_its_patience_with_a_busy_rank():
    watch = HangWatch(POLICY)
    silent = [rank(0), rank(1, 11, waiting=False)]
    assert watch.look(silent, 31.0) is not None
    watch.answer(Busy("rank 1 compiles", 62.0))
    assert watch.look(silent, 60.0) is None
    assert watch.look(silent, 63.0) is not None


IN_INIT = at(
    (f"{TORCH}/distributed/distributed_c10d.py", 9, "_new_process_group_helper"),
    (f"{TORCH}/distributed/distributed_c10d.py", 5, "init_process_group"),
    ("/project/train.py", 7, "<module>"),
)


def test_h4_a_rank_that_left_before_the_group_formed_is_to_blame():
    views = [RankView(index=n, changed_at=0.0) for n in range(2)]
    views.append(RankView(index=2, changed_at=0.0, exited=WaitStatus(code=0)))
    verdict = hang(views, {0: IN_INIT, 1: IN_INIT})
    assert verdict.headline == "rank 2 exited with code 0; ranks 0-1 wait for it in init_process_group"
    assert verdict.culprits == (2,)


def test_h4_ranks_that_do_something_else_are_not_said_to_wait():
    views = [RankView(index=0, changed_at=0.0), RankView(index=1, changed_at=0.0, exited=WaitStatus(code=0))]
    assert isinstance(judge(suspect(views), {0: IN_DATA}), Busy)
    views[0] = msgspec.structs.replace(views[0], cpu_share=0.9)
    assert decide_hang(views, POLICY, 31.0) == Healthy()


def test_a_rank_that_never_ends_is_named_beside_those_that_did():
    views = [RankView(index=n, changed_at=0.0, exited=WaitStatus(code=0)) for n in range(3)]
    views.append(RankView(index=3, changed_at=0.0, ending=True))
    joining = at(("/usr/lib/python3.11/threading.py", 1590, "_shutdown"))
    verdict = hang(views, {3: joining})
    expected = "rank 3 hangs at its exit at threading.py:1590; ranks 0-2 had ended with exit code 0"
    assert (verdict.headline, verdict.kind) == (expected, "ending")


def test_one_rank_alone_may_take_its_time_to_end():
    assert decide_hang([RankView(index=0, changed_at=0.0, ending=True)], POLICY, 500.0) == Healthy()


def test_h6_a_hang_in_which_nobody_moves_is_a_failure_after_its_timeout():
    assert decide_hang_end(0.0, [False, False], 60.0, 59.0) == "lasts"
    assert decide_hang_end(0.0, [False, False], 60.0, 60.0) == "failure"
    assert decide_hang_end(0.0, [True, False], 60.0, 90.0) == "lasts"
    assert decide_hang_end(0.0, [False, False], None, 9e9) == "lasts"
    assert decide_hang_end(0.0, [True, True], 60.0, 90.0) == "over"
