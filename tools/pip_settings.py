"""Translate pip's settings (its files and PIP_* variables) for uv, which does not read them."""

import ast
import subprocess

VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "constraint": "UV_CONSTRAINT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""Variables rather than options: an index's address may hold a password, and everyone can read a command line."""
FLAGS = {"no-cache-dir": "--no-cache", "no-index": "--no-index", "pre": "--prerelease=allow"}
IRRELEVANT = {
    *("break-system-packages", "cache-dir", "config-file", "disable-pip-version-check", "no-color", "no-input"),
    *(
        "no-warn-script-location",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "retries",
        "root-user-action",
        "verbose",
    ),
}
LAYERS = ["global", "install", ":env:"]
"""The sections of `pip config list`; a later one wins."""


def read_settings(pip: list[str]) -> dict[str, str]:
    """What `pip install` uses, by the name of its option."""
    return parse_settings(subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout)


def parse_settings(listing: str) -> dict[str, str]:
    """Read lines such as `global.index-url='https://host/simple'`."""
    layers: dict[str, dict[str, str]] = {layer: {} for layer in LAYERS}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        layer, _, name = key.rpartition(".")
        if layer in layers:
            layers[layer][name] = ast.literal_eval(value)
    return {name: value for layer in LAYERS for name, value in layers[layer].items()}


def for_uv(settings: dict[str, str]) -> tuple[list[str], dict[str, str], list[str]]:
    """The options and variables that tell uv the same, and the settings that it has no equivalent of."""
    options: list[str] = []
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip treats all indexes alike.
    unknown: list[str] = []
    for name, value in settings.items():
        if name in VARIABLES:
            # pip separates values by spaces or lines; uv wants commas in this one.
            variables[VARIABLES[name]] = ("," if name == "find-links" else " ").join(value.split())
        elif name in FLAGS:
            options += [FLAGS[name]] if value.lower() in ("1", "true", "yes", "on", "y", "t") else []
        elif name not in IRRELEVANT:
            unknown.append(name)
    return options, variables, unknown
