"""Facts about what a scan names, follows and passes over."""

import os
import sys
from pathlib import Path

import pytest

from argosy.control.launch import DYNAMO, TORCH
from argosy.supervise.imports.scan import fingerprint, scan
from argosy.supervise.imports.source import COMPILER


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site directory: one package loads names when asked, one depends on torch by metadata."""
    site = tmp_path / "lib" / "site-packages"
    write(
        site,
        {
            "torch/__init__.py": "def __getattr__(name): ...",
            "torch/nn.py": "",
            "torch/distributed/__init__.py": "",
            "plain/__init__.py": "",
            "plain/part.py": "",
            "lazy/__init__.py": "def __getattr__(name): ...",
            "heavy/__init__.py": "",
            "heavy-1.0.dist-info/METADATA": "Name: heavy\nRequires-Dist: mid>=1\n\nRequires-Dist: prose\n",
            "mid-1.0.dist-info/METADATA": "Name: mid\nRequires-Dist: torch >=2\n",
            "optional/__init__.py": "",
            "optional-1.0.dist-info/METADATA": 'Name: optional\nRequires-Dist: torch ; extra == "torch"\n',
            "native.cpython-311-x86_64-linux-gnu.so": "",
        },
    )
    return site


def scan_tree(tmp_path: Path, site: Path, files: dict[str, str], cache: Path | None = None) -> list[str]:
    write(tmp_path / "project", files)
    return scan(tmp_path / "project" / "train.py", False, [*sys.path[1:], str(site)], cache)


def test_names_packages_and_never_the_users_modules(tmp_path: Path, site: Path) -> None:
    files = {
        "train.py": "import model, json\nfrom pkg import inner\nimport native",
        "model.py": "import plain.part",
        "pkg/__init__.py": "from . import other",
        "pkg/inner.py": "from .deep.leaf import x",
        "pkg/other.py": "import csv",
        "pkg/deep/leaf.py": "import wave",  # A directory without __init__.py is a package too.
    }
    assert scan_tree(tmp_path, site, files) == ["csv", "json", "native", "plain", "plain.part", "wave"]


def test_what_lightning_brings_in_is_imported_once_although_it_is_not(tmp_path: Path, site: Path) -> None:
    write(site, {"lightning/__init__.py": "", "lightning/pytorch.py": ""})
    script = tmp_path / "project" / "train.py"
    write(script.parent, {"train.py": "import lightning.pytorch"})
    own, brought = ["lightning", "lightning.pytorch"], ["transformers:AutoModel", "transformers:AutoTokenizer"]
    assert scan(script, False, [str(site)]) == own
    write(site, {"transformers/__init__.py": "", "packaging/__init__.py": ""})
    assert scan(script, False, [str(site)]) == [*own, "packaging.requirements", *brought]
    write(script.parent, {"transformers.py": ""})  # The user's own file hides it.
    assert scan(script, False, [str(site)]) == [*own, "packaging.requirements"]


def test_torch_comes_first_with_its_companions(tmp_path: Path, site: Path) -> None:
    text = "import plain, torch\nfrom torch.utils.tensorboard import SummaryWriter"
    assert scan_tree(tmp_path, site, {"train.py": text}) == [*TORCH, "plain", "torch.utils.tensorboard"]


def test_what_comes_with_torch_is_no_entry_of_its_own(tmp_path: Path, site: Path) -> None:
    parts = ["torch.nn.functional", "torch.optim", "torch.utils.data", "torch.distributions", "torch.multiprocessing"]
    text = "".join(f"import {part}\n" for part in ("json", *parts))
    assert scan_tree(tmp_path, site, {"train.py": text}) == [*TORCH, DYNAMO]


def test_a_name_is_listed_only_where_a_package_is_lazy(tmp_path: Path, site: Path) -> None:
    found = scan_tree(tmp_path, site, {"train.py": "from lazy import Model\nfrom plain import thing, part"})
    assert found == ["lazy", "lazy:Model", "plain", "plain.part"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if True:\n import plain", ["plain"]),
        ("try:\n import plain\nexcept ImportError:\n import json", ["plain"]),
        ("with open(x):\n import plain", ["plain"]),
        ("class A:\n import plain", ["plain"]),
        ("if __name__ == '__main__':\n import plain", ["plain"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import plain", ["typing"]),
        ("def f():\n import plain", []),
        ("'''\nimport plain\n'''", []),
        ("import argosy\nfrom argosy.core import errors", []),
        ("from argosy.data import Loader, Tokens", ["argosy.data:Loader", "argosy.data:Tokens"]),
        ("import not_there\nfrom . import plain", []),
    ],
)
def test_what_runs_at_import_counts(tmp_path: Path, site: Path, text: str, expected: list[str]) -> None:
    assert scan_tree(tmp_path, site, {"train.py": text}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n import torch.nn",
        "def f():\n from torch import nn",
        "def f():\n importlib.import_module('torch')",
        "try:\n x\nexcept E:\n import torch",
        "import heavy",  # Its metadata leads there over another package.
        "import helper",
    ],
)
def test_torch_counts_wherever_it_is_reached(tmp_path: Path, site: Path, text: str) -> None:
    files = {"train.py": text, "helper.py": "async def g():\n import torch"}
    assert scan_tree(tmp_path, site, files)[: len(TORCH)] == list(TORCH)


@pytest.mark.parametrize("text", ["# import torch", "x = 'torch'", "import optional", "from .torch import x"])
def test_torch_stays_out_where_it_is_not_reached(tmp_path: Path, site: Path, text: str) -> None:
    assert "torch" not in scan_tree(tmp_path, site, {"train.py": text})


def test_main_blocks_of_imported_modules_do_not_run(tmp_path: Path, site: Path) -> None:
    files = {"train.py": "import model", "model.py": "if __name__ == '__main__':\n import plain"}
    assert scan_tree(tmp_path, site, files) == []


def test_a_file_of_the_user_hides_a_package_of_its_name(tmp_path: Path, site: Path) -> None:
    assert scan_tree(tmp_path, site, {"train.py": "import plain", "plain.py": "import json"}) == ["json"]


def test_a_data_directory_does_not_hide_a_package(tmp_path: Path, site: Path) -> None:
    (tmp_path / "project" / "plain").mkdir(parents=True)
    assert scan_tree(tmp_path, site, {"train.py": "import plain"}) == ["plain"]


def test_what_cannot_be_read_or_parsed_is_passed_over(tmp_path: Path, site: Path) -> None:
    files = {"train.py": "import broken, binary, loop, json", "broken.py": "def (", "loop.py": "import train"}
    write(tmp_path / "project", files)
    (tmp_path / "project" / "binary.py").write_bytes(b"\0\xff\xfe")
    (tmp_path / "project" / "dangling.py").symlink_to("nowhere")
    assert scan_tree(tmp_path, site, {}) == ["json"]
    assert scan(tmp_path / "missing.py", False, [str(site)]) == []


def test_a_module_is_entered_by_name(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        {
            "app/__init__.py": "import csv",
            "app/__main__.py": "from .job import x",
            "app/job.py": "import json",
        },
    )
    monkeypatch.chdir(tmp_path)
    assert scan("app", True, [*sys.path[1:], str(site)]) == ["csv", "json"]
    assert scan("app.job", True, [*sys.path[1:], str(site)]) == ["csv", "json"]
    assert scan("plain.part", True, [*sys.path[1:], str(site)]) == ["plain"]
    assert scan("nothing.here", True, [*sys.path[1:], str(site)]) == []


def test_an_editable_install_belongs_to_the_user(tmp_path: Path, site: Path) -> None:
    write(tmp_path / "checkout", {"mine/__init__.py": "import plain"})
    mapping = {"mine": str(tmp_path / "checkout" / "mine")}
    write(site, {"__editable___mine_1_finder.py": f"MAPPING: dict[str, str] = {mapping!r}\n"})
    assert scan_tree(tmp_path, site, {"train.py": "import mine"}) == ["plain"]


def test_the_cache_sees_an_edit_and_survives_damage(tmp_path: Path, site: Path) -> None:
    cache = tmp_path / "cache"
    assert scan_tree(tmp_path, site, {"train.py": "import json"}, cache) == ["json"]
    assert scan_tree(tmp_path, site, {}, cache) == ["json"]
    assert scan_tree(tmp_path, site, {"train.py": "import json, csv"}, cache) == ["csv", "json"]
    for file in cache.iterdir():
        file.write_bytes(b"garbage")
    assert scan_tree(tmp_path, site, {}, cache) == ["csv", "json"]


def test_the_cache_is_what_answers_for_a_file_that_did_not_change(tmp_path: Path, site: Path) -> None:
    cache, script = tmp_path / "cache", tmp_path / "project" / "train.py"
    scan_tree(tmp_path, site, {"train.py": "import json"}, cache)
    before = script.stat()
    script.write_text("import wave")
    os.utime(script, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert scan_tree(tmp_path, site, {}, cache) == ["json"]
    assert scan_tree(tmp_path, site, {}) == ["wave"]


def test_the_fingerprint_follows_the_site_directory_alone(tmp_path: Path, site: Path) -> None:
    path = [str(tmp_path / "project"), str(site), str(tmp_path / "gone" / "site-packages")]
    before = fingerprint(path)
    write(tmp_path / "project", {"model.py": "import json"})
    assert fingerprint(path) == before
    write(site, {"new-1.0.dist-info/METADATA": "Name: new"})
    installed = fingerprint(path)
    assert installed != before
    write(site, {"links.pth": str(tmp_path / "project")})
    assert fingerprint(path) != installed


def test_what_the_script_sets_before_its_imports_is_named(tmp_path: Path, site: Path) -> None:
    text = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "4"
os.environ.setdefault("HOME_OF", "x")
if sys.argv:
    os.environ["MAYBE"] = "1"
os.environ["COMPUTED"] = str(3)
import plain
os.environ["LATE"] = "1"
import helper
os.environ["AFTER"] = "1"
def f():
    os.environ["INNER"] = "1"
"""
    found = scan_tree(tmp_path, site, {"train.py": text, "helper.py": "import os\nos.environ['OTHER'] = '1'"})
    assert found == [
        "$COMPUTED",
        "$HOME_OF?=x",
        "$LATE",
        "$MAYBE",
        "$OMP_NUM_THREADS=4",
        "$OTHER",
        "os",
        "plain",
        "sys",
    ]


def test_nothing_is_preloaded_if_libraries_would_read_an_unknown_value(tmp_path: Path, site: Path) -> None:
    text = "import os, sys\nos.environ['OMP_NUM_THREADS'] = sys.argv[1]\nimport torch"
    assert scan_tree(tmp_path, site, {"train.py": text}) == []
    text = "import os, torch\nos.environ['OMP_NUM_THREADS'] = '1'"
    assert scan_tree(tmp_path, site, {"train.py": text}) == [*TORCH]


def test_dynamo_is_preloaded_only_where_something_trains(tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text("import torch\nprint(torch.ones(1))\n")
    (tmp_path / "trains.py").write_text("import torch\ntorch.optim.SGD([torch.ones(1)], lr=1)\n")
    assert DYNAMO not in scan(tmp_path / "looks.py", False, sys.path)
    assert DYNAMO in scan(tmp_path / "trains.py", False, sys.path)


def test_a_script_without_torch_preloads_none_whatever_it_compiles(tmp_path: Path) -> None:
    (tmp_path / "parses.py").write_text("import re\nre.compile('x')\n")
    assert scan(tmp_path / "parses.py", False, sys.path) == ["re"]


def test_the_compiler_is_preloaded_only_where_something_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import re, torch\nre.compile('x')\ntorch.optim.SGD([torch.ones(1)], lr=1)\n")
    (tmp_path / "compiles.py").write_text("import torch\ntorch.compile(torch.nn.Linear(1, 1))\n")
    assert COMPILER not in scan(tmp_path / "plain.py", False, sys.path)
    assert COMPILER in scan(tmp_path / "compiles.py", False, sys.path)
