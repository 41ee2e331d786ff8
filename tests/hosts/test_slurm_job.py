"""The batch script, the options of sbatch, and the words for where a job stands; without a Slurm."""

from pathlib import Path

import pytest

from argosy.core import ConfigError
from argosy.hosts.slurm import in_allocation
from argosy.hosts.slurm_job import BatchJob, JobStatus, batch_script, parse_options


def script(options: dict[str, str]) -> list[str]:
    job = BatchJob(
        name="x", directory=Path("/runs/50%"), nodes=3, options=options, words=["-n", "2", "a b.py"], cwd="/my work"
    )
    return batch_script(job).splitlines()


def test_a_job_takes_whole_nodes_and_ends_in_time():
    lines = script({})
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=3", "#SBATCH --exclusive", "#SBATCH --requeue", "#SBATCH --no-kill"} <= {*lines}
    assert "#SBATCH --signal=B:TERM@120" in lines
    assert "#SBATCH --output=/runs/50%%/slurm.out" in lines
    assert lines[-2] == "cd '/my work' || exit 1"
    assert lines[-1].startswith("exec ")
    assert lines[-1].endswith(" -m argosy run -n 2 'a b.py'")


def test_the_users_options_win():
    lines = script({"signal": "B:TERM@600", "cpus-per-task": "8", "comment": "two words"})
    assert "#SBATCH --signal=B:TERM@600" in lines
    assert '#SBATCH --comment="two words"' in lines
    assert "#SBATCH --exclusive" not in lines


@pytest.mark.parametrize("text", ["=1", "time=", "a b=1", "x=1\n#SBATCH --y", ","])
def test_what_is_no_option_of_sbatch_is_refused(text: str):
    with pytest.raises(ConfigError, match="not an option of sbatch"):
        parse_options(text)


def test_options_with_and_without_values():
    assert parse_options("time=1:00:00,exclusive,mail-type=END") == {
        "time": "1:00:00",
        "exclusive": "",
        "mail-type": "END",
    }
    assert parse_options("") == {}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (JobStatus("PENDING", "Resources"), "is pending (Resources)"),
        (JobStatus("PENDING", "BeginTime", restarts=2), "is pending (BeginTime), requeued 2 times"),
        (JobStatus("RUNNING", nodes="n[1-3]"), "is running on n[1-3]"),
        (JobStatus("TIMEOUT"), "is timeout"),
    ],
)
def test_where_a_job_stands_in_words(status: JobStatus, words: str):
    assert str(status) == words
    assert status.is_over == (status.state == "TIMEOUT")


def test_a_task_of_srun_commands_no_allocation():
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert in_allocation(job)
    assert in_allocation(job | {"SLURM_STEP_ID": "4294967290"})
    assert not in_allocation(job | {"SLURM_STEP_ID": "0"})
    assert not in_allocation({})
