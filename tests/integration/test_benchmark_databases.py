"""Each setting that a benchmark has on PostgreSQL gets an empty database, whatever the one before left."""

from __future__ import annotations

from measuring import benchmark
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool


def test_each_setting_has_a_database_of_its_own(postgresql_url: str) -> None:
    names = set()
    for _ in range(2):
        with benchmark("sessions").empty_database(postgresql_url) as url:
            server = create_engine(url, poolclass=NullPool)
            with server.begin() as connection:
                connection.exec_driver_sql("CREATE TABLE runs (run_id text)")  # fails where there is one
                names.add(connection.exec_driver_sql("SELECT current_database()").scalar())
    assert len(names) == 2
    given = create_engine(postgresql_url.replace("://", "+psycopg://"), poolclass=NullPool)
    with given.connect() as connection:
        left = set(connection.exec_driver_sql("SELECT datname FROM pg_database").scalars())
        assert not names & left
        assert connection.exec_driver_sql("SELECT to_regclass('runs')").scalar() is None
