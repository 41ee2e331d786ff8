"""Turn the options of `argosy run` into a launch, and hand it to the agent.

Functions that check or parse raise ConfigError.
"""

import math
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Literal

import msgspec

from argosy.cli.accelerators import count_ranks, list_accelerators, one_per_rank
from argosy.cli.allocation import leave_allocation, name_hosts, settle_engine, trusted_first
from argosy.cli.foreground import Foreground
from argosy.cli.torchrun_flags import shown_streams, visible_devices
from argosy.control import Launch, Restart, parse_restart
from argosy.core import ConfigError
from argosy.fabric import cache_dir
from argosy.hosts import in_allocation, requeue_preempted
from argosy.supervise import build_launch, check_ranks, default_name, own_limits, scan, seal_environment, submit

AUTO_PER_HOUR = 240
"""Restarts of ranks that fail by themselves: more often than every 15 s, something else is wrong."""
AUTO_STARTUP = 10
"""Restarts in a row without a step between them."""
OF_RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
)
"""Variables that Argosy sets for each rank."""
Kind = Literal["script", "module", "program"]


class Options(msgspec.Struct, kw_only=True):
    """The options of `argosy run`, as click parsed them."""

    ranks: str | None = None
    spare_gpus: int = 0
    alone: bool = False
    hosts: int | None = None
    engine: str | None = None
    spares: int = 0
    exclude: str | None = None
    check: str = ""
    mesh: str | None = None
    module: bool = False
    no_python: bool = False
    detach: bool = False
    name: str | None = None
    directory: str | None = None
    restart: str | None = None
    max_restarts: int | None = None
    grace: float = 30.0
    hang_after: float = 30.0
    hang_timeout: float | None = None
    threads: str | None = None
    secrets: tuple[str, ...] = ()
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    tee: str = "0"
    redirects: str = "0"
    log_dir: str | None = None
    local_ranks_filter: str | None = None
    role: str = "default"
    virtual_local_rank: bool = False
    as_json: bool = False


def start(options: Options, target: str, args: list[str], program: bool) -> int:
    """Start the run; returns its exit code, or 0 at once if it is detached."""
    kind: Kind = "program" if program else "module" if options.module else "script"
    check_directory()
    check_text([target, *args, options.name or "", options.directory or ""])
    check_target(kind, target)
    for flag in ("grace", "hang_after", "hang_timeout"):
        check_seconds(flag.replace("_", "-"), getattr(options, flag))
    options.engine = settle_engine(options.engine, options.hosts, options.spares)
    names = name_hosts(options.engine, options.hosts, options.spares, (options.exclude or "").split(","))
    names = trusted_first(names, choose_directory(options, target)[0])
    if names and options.master_port:
        raise ConfigError("--master-port is not for several hosts: the host of rank 0 takes a free one")
    options.hosts = nodes = options.hosts or len(names) - options.spares or 1
    dims = parse_dims(options, nodes)
    one = is_one_stream(options, prod(dims.values()))
    shown = shown_streams("2" if one else options.redirects, prod(dims.values()), options.local_ranks_filter)
    secrets = read_secrets(options.secrets, os.environ)
    environment = {name: value for name, value in os.environ.items() if name not in secrets}
    launch = make_launch(options, kind, target, args, dims, environment)
    if names:
        launch = msgspec.structs.replace(launch, nodes=nodes, engine=options.engine, check=options.check)
    if in_allocation(os.environ):  # What lingers would be killed with the job, and leave its files.
        launch = msgspec.structs.replace(launch, linger_s=0.0)
    sealed = seal_environment(environment, secrets, own_limits())
    link, welcome = submit(launch, [sealed] if options.detach else [sealed, 0], names)
    if options.as_json:
        print(msgspec.json.encode(welcome).decode(), flush=True)
    elif options.detach:
        name = os.path.basename(welcome.directory)
        print(f"started {name} in {os.path.relpath(welcome.directory)}", flush=True)
        print(f"  argosy logs -f {name}\n  argosy stop {name}", file=sys.stderr)
    try:
        code = 0 if options.detach else Foreground(link, welcome, None if options.as_json else shown).run()
    finally:
        link.close()
        leave_allocation(os.environ)
    if code == 128 + signal.SIGTERM and requeue_preempted(os.environ):
        print("argosy: Slurm preempted the job; it is requeued, and resumes then", file=sys.stderr, flush=True)
    return code


def is_one_stream(options: Options, size: int) -> bool:
    """Whether both streams of the only rank go to the same place, such as a terminal."""
    apart = options.detach or options.as_json or (options.redirects, options.tee) != ("0", "0")
    with suppress(OSError):
        return size == 1 and not apart and os.path.sameopenfile(1, 2)
    return False


def make_launch(
    options: Options,
    kind: Kind,
    target: str,
    args: list[str],
    dims: dict[str, int],
    environment: Mapping[str, str],
) -> Launch:
    """Put the launch together."""
    directory, name = choose_directory(options, target)
    per_host = prod(dims.values()) // (options.hosts or 1)
    devices, spare_devices = one_per_rank(options.ranks, per_host, options.spare_gpus, list_accelerators(environment))
    return build_launch(
        environment,
        name=name,
        directory=str(directory),
        argv=["argosy", *sys.argv[1:]],
        kind=kind,
        target=target,
        args=args,
        dims=dims,
        alone=options.alone,
        preload=[] if kind == "program" else scan(target, kind == "module", sys.path[1:], cache_dir() / "scans"),
        restart=choose_restart(options),
        grace_s=options.grace,
        hang_after_s=options.hang_after,
        hang_timeout_s=options.hang_timeout,
        threads=parse_threads(options.threads, per_host),
        master_addr=options.master_addr,
        master_port=options.master_port,
        role=options.role,
        devices=visible_devices(per_host, environment) if options.virtual_local_rank else devices,
        spare_devices=spare_devices,
        one_file=is_one_stream(options, prod(dims.values())),
        logs=str(Path(options.log_dir).absolute()) if options.log_dir else "",
        fresh=options.directory is None and options.name is None,
        detached=options.detach,
    )


def check_seconds(flag: str, seconds: float | None) -> None:
    """Refuse seconds that are negative, infinite or not a number."""
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ConfigError(f"--{flag} must be a number of seconds: {seconds}")


def check_directory() -> None:
    """Refuse to start from a directory that was removed."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the working directory cannot be used: {error.strerror}", hint="cd to another one") from None


def check_text(words: Sequence[str]) -> None:
    """Refuse bytes that are not UTF-8: they could be neither sent nor written down."""
    for word in words:
        if any("\udc80" <= letter <= "\udcff" for letter in word):
            raise ConfigError(f"not UTF-8: {os.fsencode(word)!r}", hint="names and arguments must be text")


def check_target(kind: str, target: str) -> None:
    """Refuse a script or program that does not exist; about a module python itself says it best."""
    if kind == "script" and not os.path.isfile(target):
        what = "is a directory" if os.path.isdir(target) else "does not exist"
        raise ConfigError(f"the script {what}: {target}", hint="programs are started with `argosy run -- PROGRAM`")
    if kind == "script" and not os.access(target, os.R_OK):
        raise ConfigError(f"the script cannot be read: {target}")
    if kind == "program" and shutil.which(target) is None:
        if not os.path.exists(target) or os.sep not in target:
            raise ConfigError(f"no such program: {target}")
        what = "is a directory" if os.path.isdir(target) else "is not executable"
        raise ConfigError(f"the program {what}: {target}")


def parse_dims(options: Options, nodes: int = 1) -> dict[str, int]:
    """The mesh: named dimensions, or one called `rank`. `-n` counts the ranks of one of the `nodes`."""
    if options.mesh:
        if options.ranks:
            raise ConfigError("give either -n or --mesh, not both")
        try:
            pairs = [(name.strip(), int(extent)) for name, extent in (p.split("=") for p in options.mesh.split(","))]
        except ValueError:
            raise ConfigError(f"--mesh must look like dp=2,tp=2: {options.mesh!r}") from None
        dims = dict(pairs)
        if len(dims) < len(pairs) or "" in dims:
            raise ConfigError(f"each dimension of --mesh needs a name of its own: {options.mesh!r}")
    else:
        ranks, accelerators = options.ranks or "1", list_accelerators(os.environ)
        dims = {"rank": nodes * count_ranks(ranks, accelerators, len(os.sched_getaffinity(0)), options.spare_gpus)}
    check_ranks(dims)
    if prod(dims.values()) % nodes:
        raise ConfigError(f"{prod(dims.values())} ranks cannot be the same number on each of {nodes} hosts")
    return dims


def choose_restart(options: Options) -> Restart:
    """`--max-restarts` alone restarts all ranks, as torchrun does; without either, `argosy.Run` gets ranks back."""
    if options.restart is None:
        if options.max_restarts is None:
            return Restart(policy="auto", per_hour=AUTO_PER_HOUR, startup_max=AUTO_STARTUP)
        if not options.max_restarts:
            return Restart.never()
        return Restart(policy="all", max_restarts=options.max_restarts, startup_max=options.max_restarts)
    return parse_restart(options.restart, options.max_restarts)


def parse_threads(text: str | None, size: int) -> int:
    """0 for the default, else the number of threads."""
    if text is None:
        return 0
    if text == "auto":
        return max(1, len(os.sched_getaffinity(0)) // size)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--threads must be a positive number or auto: {text!r}")
    return int(text)


def read_secrets(names: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """The values of `--secret NAME` (from the environment) and `--secret NAME=FILE`."""
    secrets: dict[str, str] = {}
    for given in names:
        name, equals, path = given.partition("=")
        if not name or name in OF_RANKS or name.startswith(("ARGOSY_", "TORCHELASTIC_")):
            raise ConfigError(f"not a name for a secret: {name!r}", hint="Argosy sets this variable itself")
        if equals:
            try:
                secrets[name] = Path(path).read_text().rstrip("\n")
            except OSError as error:
                raise ConfigError(f"the secret {name} cannot be read: {error.strerror}: {path}") from None
        elif name in environment:
            secrets[name] = environment[name]
        else:
            raise ConfigError(f"the secret is not in the environment: {name}", hint=f"give --secret {name}=FILE")
    return secrets


def choose_directory(options: Options, target: str) -> tuple[Path, str]:
    """The run's directory and name."""
    given = Path(options.directory).absolute() if options.directory else None
    name = options.name or (given.name if given else default_name(target))
    if given is not None:
        return given, name
    return Path("runs").absolute() / name, name
