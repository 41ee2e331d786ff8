"""What ranks leave in shared memory does not grow with their deaths."""

from pathlib import Path

from argosy.core import RankId
from argosy.supervise.agent.rank_footprint import RankFootprint


def test_only_the_last_life_of_a_rank_leaves_a_page(tmp_path: Path):
    footprint = RankFootprint("run", tmp_path, None)
    for generation in range(5):
        for index in (1, 11):
            rank = RankId("ranks", index, generation)
            footprint.prepare(rank)
            Path(footprint.page(rank)).touch()
            Path(f"{footprint.page(rank)}.spans").touch()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{index}.{life}.page{end}" for index in (1, 11) for life in (3, 4) for end in ("", ".spans")}
