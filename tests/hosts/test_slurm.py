"""Runs on a real Slurm: submitted and streamed, within an allocation, with a lost node, and how jobs end."""

import re
import sys
from collections.abc import Iterator

import pytest
from console import PATIENCE_S, Console, until
from hosts.fleet import SCRIPTS, Fleet
from hosts.slurm_cluster import SlurmCluster, Submitted, slurm_cluster

from argosy.control import facts
from argosy.supervise.records.rundir import read_facts, read_record

pytest.importorskip("cryptography")
pytestmark = pytest.mark.engines
STEPS = 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def submitted(cluster: SlurmCluster, console: Console, request: pytest.FixtureRequest) -> Submitted:
    return Submitted(cluster, console, re.sub(r"^test_", "", request.node.name)[:20])


def train(run: Submitted, seconds: float) -> list[str]:
    return ["-n", "1", str(SCRIPTS / "train.py"), str(run.directory), str(STEPS), str(seconds)]


def digests(text: str) -> set[str]:
    return set(re.findall(r"digest ([0-9a-f]{64})", text))


_undisturbed: set[str] = set()


def undisturbed(console: Console) -> set[str]:
    """What the training of two ranks ends with on one host."""
    if not _undisturbed:
        ended = console.argosy("run", "-n", "2", str(SCRIPTS / "train.py"), "runs/calm", str(STEPS), "0")
        assert ended.code == 0, ended.text
        _undisturbed.update(digests(ended.text))
    return _undisturbed


def test_the_script_is_printed_and_nothing_is_submitted(submitted: Submitted):
    words = ["run", "--on", "slurm:partition=urgent,time=60", "--hosts", "3", "-n", "2", "--dry-run"]
    shown = submitted.console.argosy(*words, str(SCRIPTS / "sums.py"))
    assert shown.code == 0, shown.text
    lines = shown.out.decode().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=3", "#SBATCH --partition=urgent", "#SBATCH --time=60"} <= {*lines}
    assert "--dry-run" not in lines[-1]
    assert submitted.cluster.ask("squeue", "-h") == ""
    assert not (submitted.console.cwd / "runs").exists()


def test_the_weights_are_those_of_four_local_hosts(submitted: Submitted):
    command = submitted.start("--on", "slurm", "--hosts", "4", *train(submitted, 0.0))
    assert command.wait(PATIENCE_S) == 0, submitted.text
    fleet = Fleet(submitted.console, "locally", 4)
    words = ["-n", "1", str(SCRIPTS / "train.py"), str(fleet.directory), str(STEPS), "0"]
    assert fleet.end(fleet.start(*words)) == 0, fleet.text
    assert digests(submitted.text) == digests(fleet.text) != set()
    submitted.cluster.check_nothing_is_left(submitted.job)


def test_a_plain_run_within_an_allocation_uses_all_of_its_nodes(submitted: Submitted):
    cluster, console = submitted.cluster, submitted.console
    script = console.cwd / "job.sh"
    inner = f"env -u ARGOSY_RUNTIME_DIR {sys.executable} -m argosy run --name inside {SCRIPTS / 'sums.py'}"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output=job.out\ncd {console.cwd}\n{inner}\n"
    )
    job = console.run(["sbatch", "--parsable", str(script)]).out.decode().strip()
    cluster.wait_for(job, "COMPLETED", "FAILED")
    said = (console.cwd / "job.out").read_text()
    places = sorted(line.split("place ")[1] for line in said.splitlines() if "place " in line)
    assert places == ["0 0 0 2 1 2 sum 3", "1 0 1 2 1 2 sum 3"], said
    assert cluster.state(job) == "COMPLETED"
    cluster.check_nothing_is_left(job)


def test_the_ranks_of_a_node_that_is_down_continue_on_the_spare_one(submitted: Submitted):
    cluster = submitted.cluster
    command = submitted.start("--on", "slurm", "--hosts", "2", "--spares", "1", *train(submitted, 0.3))
    submitted.wait_for("did step 3;")
    lost = cluster.nodes[1]
    try:
        cluster.do("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
        assert command.wait(PATIENCE_S) == 0, submitted.text
    finally:
        cluster.do("scontrol", "update", f"nodename={lost}", "state=resume")
    assert digests(submitted.text) == undisturbed(submitted.console), submitted.text
    seen = [fact for fact in read_facts(submitted.directory) if isinstance(fact, facts.HostLost)]
    assert [(fact.host, fact.ranks, fact.spare) for fact in seen] == [(lost, [1], cluster.nodes[2])]
    assert f"host {lost} lost" in submitted.console.argosy("why", str(submitted.directory)).text
    cluster.check_nothing_is_left(submitted.job, lost)


def test_scancel_ends_the_run_cleanly_and_the_next_job_resumes_it(submitted: Submitted):
    cluster = submitted.cluster
    command = submitted.start("--on", "slurm", "--hosts", "2", *train(submitted, 0.3))
    submitted.wait_for("did step 3;")
    first = submitted.job
    cluster.do("scancel", first)
    assert command.wait(PATIENCE_S) != 0, submitted.text
    record = read_record(submitted.directory)
    assert (record.state, record.code) == ("ended", 143), submitted.text
    cluster.check_nothing_is_left(first)
    command = submitted.start("--on", "slurm", "--hosts", "2", *train(submitted, 0.0))
    assert command.wait(PATIENCE_S) == 0, submitted.text
    assert "did step 1;" not in submitted.text
    assert digests(submitted.text) == undisturbed(submitted.console), submitted.text
    cluster.check_nothing_is_left(submitted.job)


def test_a_requeued_job_resumes(submitted: Submitted):
    cluster = submitted.cluster
    command = submitted.start("--on", "slurm", "--hosts", "2", *train(submitted, 0.3))
    submitted.wait_for("did step 3;")
    cluster.do("scontrol", "requeue", submitted.job)
    assert command.wait(PATIENCE_S) == 0, submitted.text
    assert read_record(submitted.directory).launch == 2
    assert submitted.text.count("did step 1;") == 1
    assert digests(submitted.text) == undisturbed(submitted.console), submitted.text
    cluster.check_nothing_is_left(submitted.job)


def test_a_preempted_job_saves_and_resumes(submitted: Submitted):
    cluster = submitted.cluster
    command = submitted.start("--on", "slurm", "--hosts", "2", *train(submitted, 0.3))
    submitted.wait_for("did step 3;")
    urgent = cluster.do(
        *("sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null"),
        *("--wrap", "sleep 2"),
    )
    cluster.wait_for(urgent, "COMPLETED")
    assert command.wait(PATIENCE_S) == 0, submitted.text
    assert read_record(submitted.directory).launch == 2
    assert submitted.text.count("did step 1;") == 1
    assert digests(submitted.text) == undisturbed(submitted.console), submitted.text
    cluster.check_nothing_is_left(submitted.job)


def test_the_time_limit_ends_the_run_cleanly(submitted: Submitted):
    words = ["--on", "slurm:time=2,signal=B:TERM@60", "--hosts", "2", "-n", "1", "--", "sleep", "1000"]
    command = submitted.start(*words)
    assert command.wait(PATIENCE_S) == 143, submitted.text
    record = read_record(submitted.directory)
    assert (record.state, record.code) == ("ended", 143), submitted.text
    assert "has to end at" in submitted.console.argosy("why", str(submitted.directory)).text
    until(lambda: submitted.cluster.state(submitted.job) == "FAILED", "a job that ended by itself")
    submitted.cluster.check_nothing_is_left(submitted.job)
