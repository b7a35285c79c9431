"""Database triggers: a job that has ended never changes its state again, whoever writes.

Installed after every migrate and not by a migration, because SQLite drops a table's triggers when Django rebuilds the table.
"""

from django.db import connections

from webapp.jobs.models import TERMINAL_STATES

_ENDED = ", ".join(f"'{state.value}'" for state in TERMINAL_STATES)

_SQLITE = f"""
CREATE TRIGGER IF NOT EXISTS job_ended_is_final BEFORE UPDATE OF state ON jobs_job
WHEN OLD.state IN ({_ENDED}) AND NEW.state <> OLD.state
BEGIN SELECT RAISE(ABORT, 'an ended job cannot change its state'); END
"""

_POSTGRESQL_FUNCTION = """
CREATE OR REPLACE FUNCTION job_ended_is_final() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'an ended job cannot change its state' USING ERRCODE = 'check_violation';
END $$
"""

_POSTGRESQL_TRIGGER = f"""
CREATE OR REPLACE TRIGGER job_ended_is_final BEFORE UPDATE OF state ON jobs_job
FOR EACH ROW WHEN (OLD.state IN ({_ENDED}) AND NEW.state <> OLD.state) EXECUTE FUNCTION job_ended_is_final()
"""


def install_triggers(using: str) -> None:
    """Idempotent. Does nothing before the table exists or on other databases."""
    connection = connections[using]
    if "jobs_job" not in connection.introspection.table_names():
        return
    statements = {"sqlite": [_SQLITE], "postgresql": [_POSTGRESQL_FUNCTION, _POSTGRESQL_TRIGGER]}
    with connection.cursor() as cursor:
        for statement in statements.get(connection.vendor, []):
            cursor.execute(statement)
