"""Answer SQL about a run with DuckDB, in memory. It reads the run's tables and nothing else."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from argosy.core import ConfigError
from argosy.observe import Columns

_ALLOWED = {"SELECT", "EXPLAIN"}


class Answer(NamedTuple):
    """Names of the columns, and the rows."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def query(tables: Mapping[str, Columns], text: str) -> Answer:
    """Run one SELECT.

    Raises:
        ConfigError: DuckDB is missing, or the statement is wrong, writes, or reads files.
    """
    try:
        import duckdb
    except ImportError:
        raise ConfigError("SQL needs DuckDB", hint="pip install duckdb") from None
    connection: Any = duckdb.connect(":memory:")
    try:
        statements = connection.extract_statements(text)
        kinds = {str(statement.type).rpartition(".")[2] for statement in statements}
        if len(statements) != 1 or not kinds <= _ALLOWED:
            raise ConfigError(
                f"one SELECT is allowed: {text.strip()[:80]}", hint=f"the tables are {', '.join(sorted(tables))}"
            )
        for name, columns in tables.items():
            connection.register(name, dict(columns))
        for setting in ("enable_external_access", "python_enable_replacements"):
            connection.execute(f"SET {setting} = false")
        connection.execute("SET lock_configuration = true")
        found = connection.execute(text)
        return Answer([each[0] for each in found.description], found.fetchall())
    except duckdb.Error as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"SQL: {first}", hint=f"the tables are {', '.join(sorted(tables))}") from None
    finally:
        connection.close()
