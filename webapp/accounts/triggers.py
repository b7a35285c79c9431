"""Database triggers: a record of the audit trail is never changed, and on PostgreSQL never deleted, whoever writes.

Installed after every migrate and not by a migration, as those of jobs are. On SQLite whoever can delete a row can as well replace
the file, and emptying a table (which tests do) is a DELETE there; on PostgreSQL it is a TRUNCATE, which the trigger lets pass.
"""

from django.db import connections

_TABLE = "accounts_auditrecord"
_MESSAGE = "the audit trail is append-only"

_SQLITE = f"""
CREATE TRIGGER IF NOT EXISTS audit_is_append_only BEFORE UPDATE ON {_TABLE}
BEGIN SELECT RAISE(ABORT, '{_MESSAGE}'); END
"""

_POSTGRESQL_FUNCTION = f"""
CREATE OR REPLACE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '{_MESSAGE}' USING ERRCODE = 'check_violation';
END $$
"""

_POSTGRESQL_TRIGGER = f"""
CREATE OR REPLACE TRIGGER audit_is_append_only BEFORE UPDATE OR DELETE ON {_TABLE}
FOR EACH ROW EXECUTE FUNCTION audit_is_append_only()
"""


def install_triggers(using: str) -> None:
    """Idempotent. Does nothing before the table exists or on other databases."""
    connection = connections[using]
    if _TABLE not in connection.introspection.table_names():
        return
    statements = {"sqlite": [_SQLITE], "postgresql": [_POSTGRESQL_FUNCTION, _POSTGRESQL_TRIGGER]}
    with connection.cursor() as cursor:
        for statement in statements.get(connection.vendor, []):
            cursor.execute(statement)
