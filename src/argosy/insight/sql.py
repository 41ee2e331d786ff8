"""Answer SQL about a run with DuckDB, in memory. It reads the run's tables and Parquet files, and nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from argosy.core import ConfigError
from argosy.insight.segments import Records, Write
from argosy.observe import Columns

_ALLOWED = {"SELECT", "EXPLAIN"}


class Answer(NamedTuple):
    """Names of the columns, and the rows."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def duckdb_module() -> Any:
    """DuckDB.

    Raises:
        ConfigError: it is missing.
    """
    try:
        import duckdb
    except ImportError:
        raise ConfigError("this needs DuckDB", hint="pip install duckdb") from None
    return duckdb


def parquet_writer() -> Write:
    """What makes Parquet files.

    Raises:
        ConfigError: DuckDB is missing.
    """
    duckdb = duckdb_module()

    def write(content: Columns | list[str], path: Path) -> None:
        connection: Any = duckdb.connect(":memory:")
        try:
            if isinstance(content, list):
                source = connection.read_parquet(content)
            else:
                connection.register("content", dict(content))
                source = connection.table("content")
            source.write_parquet(str(path), compression="zstd")
        except duckdb.IOException as error:
            raise OSError(str(error)) from None
        finally:
            connection.close()

    return write


def query(tables: Mapping[str, Columns], text: str, records: Sequence[Records] = ()) -> Answer:
    """Run one SELECT.

    Raises:
        ConfigError: DuckDB is missing, or the statement is wrong, writes, or reads files.
    """
    duckdb = duckdb_module()
    names = ", ".join(sorted([*tables, "records"] if records else tables))
    connection: Any = duckdb.connect(":memory:")
    try:
        statements = connection.extract_statements(text)
        kinds = {str(statement.type).rpartition(".")[2] for statement in statements}
        if len(statements) != 1 or not kinds <= _ALLOWED:
            raise ConfigError(f"one SELECT is allowed: {text.strip()[:80]}", hint=f"the tables are {names}")
        for name, columns in tables.items():
            connection.register(name, dict(columns))
        files = [file for each in records for file in each.files]
        _show_records(connection, files, [each.tail for each in records if each.tail is not None])
        connection.execute("SET allowed_paths = ?", [files])
        for setting in ("enable_external_access", "python_enable_replacements"):
            connection.execute(f"SET {setting} = false")
        connection.execute("SET lock_configuration = true")
        found = connection.execute(text)
        return Answer([each[0] for each in found.description], found.fetchall())
    except duckdb.Error as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"SQL: {first}", hint=f"the tables are {names}") from None
    finally:
        connection.close()


def _show_records(connection: Any, files: list[str], tails: list[Columns]) -> None:
    """The view `records`: the files, and what is newer."""
    parts: list[str] = []
    if files:
        connection.read_parquet(files).create_view("records_in_files")
        parts.append("FROM records_in_files")
    for number, tail in enumerate(tails):
        connection.register(f"records_tail_{number}", dict(tail))
        parts.append(f"FROM records_tail_{number}")
    if parts:
        connection.execute(f"CREATE VIEW records AS {' UNION ALL '.join(parts)}")
