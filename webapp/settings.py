"""Settings, all from the environment; ``docs/configuration.md`` lists the variables.

One folder, ``HEADROOM_HOME``, holds all state of the embedded stack: database, uploads, jobs, secrets, sockets.
"""

import ipaddress
import os
import secrets
import tempfile
from pathlib import Path
from urllib.parse import unquote

import environ
from csp.constants import NONE, SELF

from optimizer.base.disk import disk_floor_bytes

env = environ.Env()

BASE_DIR = Path(__file__).resolve().parent.parent
HEADROOM_HOME = Path(env.str("HEADROOM_HOME", default=str(BASE_DIR / ".headroom"))).resolve()
HEADROOM_HOME.mkdir(mode=0o700, parents=True, exist_ok=True)

PRODUCTION = env.bool("HEADROOM_PRODUCTION", default=False)
"""True behind TLS: secure cookies, HSTS, redirect. False serves plain HTTP on loopback."""

HEADROOM_BEHIND_PROXY = env.bool("HEADROOM_BEHIND_PROXY", default=False)
"""True where every request comes through a proxy that sets X-Forwarded-For and X-Forwarded-Proto itself."""
HEADROOM_TRUSTED_PROXIES = env.list("HEADROOM_TRUSTED_PROXIES", default=["127.0.0.1"])
"""Addresses or networks of those proxies; who calls from elsewhere is not believed."""
for _proxy in HEADROOM_TRUSTED_PROXIES:
    ipaddress.ip_network(_proxy)  # a slip is reported now, by the address that is wrong

DEBUG = False


def _secret_key() -> str:
    """From the environment, else made once and kept in HEADROOM_HOME, mode 0600."""
    if given := env.str("HEADROOM_SECRET_KEY", default=""):
        return str(given)
    path = HEADROOM_HOME / "secret_key"
    try:
        with path.open("x") as file:
            path.chmod(0o600)
            file.write(secrets.token_urlsafe(64))
    except FileExistsError:
        pass
    return path.read_text()


SECRET_KEY = _secret_key()
ALLOWED_HOSTS = env.list("HEADROOM_ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])
CSRF_FAILURE_VIEW = "webapp.accounts.middleware.answer_old_page"
CSRF_TRUSTED_ORIGINS = env.list("HEADROOM_CSRF_TRUSTED_ORIGINS", default=[])

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "servestatic",
    "webapp.http.static_files.CollectedFiles",
    "django_htmx",
    "ninja",
    "webapp.accounts",
    "webapp.webhooks",
    "webapp.catalog",
    "webapp.jobs",
    "webapp.batches",
    "webapp.live",
    "webapp.api",
    "webapp.pages",
]

MIDDLEWARE = [
    "webapp.monitoring.requests.count_requests",
    "webapp.http.middleware.problem_middleware",  # around the rest: it also words what the others refuse
    "django.middleware.security.SecurityMiddleware",
    "webapp.http.static_files.serve_static",
    "webapp.http.headers.guard_answers",  # static files are answered above it
    "webapp.http.compression.CompressWhole",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "webapp.accounts.middleware.AccessMiddleware",
]

ROOT_URLCONF = "webapp.urls"
ASGI_APPLICATION = "webapp.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "webapp" / "templates", BASE_DIR / "webapp" / "api" / "templates"],
        "APP_DIRS": False,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "webapp.pages.context.work_in",
                "webapp.pages.context.alarm",
                "webapp.pages.context.theme",
            ],
        },
    }
]

SQLITE_URL = f"sqlite:///{HEADROOM_HOME / 'headroom.sqlite3'}"
DATABASES = {"default": env.db_url("DATABASE_URL", default=SQLITE_URL)}
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    _synchronous = env.str("HEADROOM_SQLITE_SYNCHRONOUS", default="NORMAL")
    if _synchronous not in ("NORMAL", "FULL"):
        raise ValueError(f"HEADROOM_SQLITE_SYNCHRONOUS is {_synchronous!r}; allowed: NORMAL, FULL")
    DATABASES["default"]["CONN_MAX_AGE"] = env.float("HEADROOM_SQLITE_KEPT_S", default=0.0)
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": env.float("HEADROOM_WRITE_WAIT_S", default=20.0),
        "init_command": f"PRAGMA journal_mode=WAL; PRAGMA synchronous={_synchronous}; PRAGMA foreign_keys=ON;",
    }
else:
    # a Unix socket's folder stands in the address as libpq writes it: postgres://user@%2Frun%2Fpostgresql/name
    DATABASES["default"]["HOST"] = unquote(DATABASES["default"]["HOST"])
    DATABASES["default"]["CONN_MAX_AGE"] = 0
    # the pool asks a connection before it lends it: those that a restart of the server ended are made anew
    DATABASES["default"]["CONN_HEALTH_CHECKS"] = True
    DATABASES["default"]["OPTIONS"] = {
        "pool": {"min_size": 1, "max_size": 10, "timeout": 5},
        "prepare_threshold": 2,  # of ``webapp/prepared.py`` alone: what Django writes carries its values in its text
        "options": "-c statement_timeout=10000 -c lock_timeout=3000 -c idle_in_transaction_session_timeout=30000",
    }
# a file, because threads and processes of a test share it; one each for test runs side by side
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    DATABASES["default"]["TEST"] = {"NAME": str(Path(tempfile.gettempdir()) / f"headroom-test-{os.getpid()}.sqlite3")}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = env.str("REDIS_URL", default=f"unix://{HEADROOM_HOME / 'run' / 'valkey.sock'}")
"""Broker and telemetry streams; the embedded stack's Valkey listens on a private socket."""

HEADROOM_SUBMISSIONS_AT_ONCE = env.int("HEADROOM_SUBMISSIONS_AT_ONCE", default=4)
"""Submissions and moves of jobs over the API that one web process works on at the same time."""
HEADROOM_SUBMISSIONS_WAITING = env.int("HEADROOM_SUBMISSIONS_WAITING", default=12)
"""Further ones that wait their turn; past these the answer is 503 with Retry-After."""
HEADROOM_MAX_REQUESTS_PER_MINUTE = env.int("HEADROOM_MAX_REQUESTS_PER_MINUTE", default=12_000)
"""Requests of one person to the API, counted over all web processes; 0 for no limit."""
HEADROOM_MAX_REQUESTS_PER_MINUTE_PER_PROJECT = env.int("HEADROOM_MAX_REQUESTS_PER_MINUTE_PER_PROJECT", default=60_000)
"""Requests to the API that name something of one project, or work in it, by all of its people together; 0 for no limit."""
HEADROOM_MAX_QUEUED_PER_PERSON = env.int("HEADROOM_MAX_QUEUED_PER_PERSON", default=20_000)
"""Jobs of one person that may wait at once; 0 for no limit."""
HEADROOM_MAX_QUEUED_PER_PROJECT = env.int("HEADROOM_MAX_QUEUED_PER_PROJECT", default=50_000)
"""Jobs of one project that may wait at once; 0 for no limit."""
HEADROOM_MAX_STREAMS_PER_PERSON = env.int("HEADROOM_MAX_STREAMS_PER_PERSON", default=20)
"""Streams of events and of chat answers that one person may have open, counted over all web processes; 0 for no limit."""
HEADROOM_MAX_STREAMS_PER_PROJECT = env.int("HEADROOM_MAX_STREAMS_PER_PROJECT", default=1_000)
"""Streams of events of the jobs of one project, whoever follows them; 0 for no limit."""

HEADROOM_RETRY_BASE_S = env.float("HEADROOM_RETRY_BASE_S", default=10.0)
"""Delay before the first retry of a lost attempt; each further one doubles it, up to 36 times this."""
HEADROOM_AWAY_S = env.float("HEADROOM_AWAY_S", default=600.0)
"""A job over several machines that lost one waits so long for it before it goes on without; 0: for ever."""
HEADROOM_PROBE_ENOUGH_LEFT_S = env.float("HEADROOM_PROBE_ENOUGH_LEFT_S", default=600.0)
"""A training job with at least so much before it takes another plan when its first steps miss their prediction."""
HEADROOM_MAX_UPLOAD_BYTES = env.int("HEADROOM_MAX_UPLOAD_BYTES", default=0)
"""Largest upload of a model or dataset; 0 for as much as the disk holds. Every other body ends at 1 MiB."""
HEADROOM_DISK_RESERVE_BYTES = env.int("HEADROOM_DISK_RESERVE_BYTES", default=2 * 1024**3)
"""Bytes of the disk that uploads leave free, for checkpoints and the database."""
HEADROOM_DISK_FLOOR_BYTES = disk_floor_bytes()
"""Free bytes below which no job and no piece of an upload is accepted; checkpoints leave them free too."""
HEADROOM_MAX_OPEN_UPLOAD_BYTES = env.int("HEADROOM_MAX_OPEN_UPLOAD_BYTES", default=256 * 1024**3)
"""Bytes that one person's unfinished uploads may have announced together; 0 for as many as the disk holds."""
HEADROOM_MAX_STORED_BYTES_PER_PERSON = env.int("HEADROOM_MAX_STORED_BYTES_PER_PERSON", default=0)
"""Bytes that one person's models, datasets, prompts and runs may take when something is uploaded; 0 for no limit."""
HEADROOM_MAX_STORED_BYTES_PER_PROJECT = env.int("HEADROOM_MAX_STORED_BYTES_PER_PROJECT", default=0)
"""The same of one project, whoever uploaded them."""


def _folders(variable: str) -> list[Path]:
    """Colon separated and absolute; a relative one would mean another folder for each process."""
    folders = [Path(part).expanduser() for part in env.str(variable, default="").split(":") if part.strip()]
    for folder in folders:
        if not folder.is_absolute():
            raise ValueError(f"{variable} names {str(folder)!r}; allowed: absolute folders, with a colon between them")
    return folders


HEADROOM_MODEL_ROOTS = _folders("HEADROOM_MODEL_ROOTS")
"""Folders of this server below which people may name a model's folder; its weights are linked, not copied."""

HEADROOM_DATASET_ROOTS = _folders("HEADROOM_DATASET_ROOTS")
"""Folders of this server below which people may name a file or a folder of data, which is copied."""

HEADROOM_HUB = env.bool("HEADROOM_HUB", default=False)
"""Opens the Hugging Face hub: people may then have models fetched from it."""
HEADROOM_HUB_URL = env.str("HEADROOM_HUB_URL", default="https://huggingface.co")
HEADROOM_HUB_HOSTS = env.list("HEADROOM_HUB_HOSTS", default=[])
"""Further hosts, as host or host:port, that the hub may redirect downloads to; its own are known."""

HEADROOM_PUBLIC_URL = env.str("HEADROOM_PUBLIC_URL", default="")
"""Address of this service as people type it, for links in notices."""
HEADROOM_EMAIL_URL = env.str("HEADROOM_EMAIL_URL", default="")
"""Mail server for notices: ``smtp+tls://user:password@host:587``, ``smtp+ssl://…`` or ``smtp://host:25``."""
HEADROOM_EMAIL_DOMAINS = env.list("HEADROOM_EMAIL_DOMAINS", default=[])
"""Domains that notices may be mailed to; none named: all."""
_mail = env.email_url("HEADROOM_EMAIL_URL", default="dummymail://")
EMAIL_BACKEND = _mail["EMAIL_BACKEND"]
EMAIL_HOST, EMAIL_PORT = _mail.get("EMAIL_HOST") or "localhost", _mail.get("EMAIL_PORT") or 25
EMAIL_HOST_USER, EMAIL_HOST_PASSWORD = _mail.get("EMAIL_HOST_USER") or "", _mail.get("EMAIL_HOST_PASSWORD") or ""
EMAIL_USE_TLS, EMAIL_USE_SSL = _mail.get("EMAIL_USE_TLS", False), _mail.get("EMAIL_USE_SSL", False)
EMAIL_TIMEOUT = 10
DEFAULT_FROM_EMAIL = env.str("HEADROOM_EMAIL_FROM", default="headroom@localhost")

HEADROOM_MIRRORS = env.list("HEADROOM_MIRRORS", default=[])
"""Services that jobs may be copied to: wandb, mlflow. Their own variables are the workers' alone."""
if _unknown := sorted(set(HEADROOM_MIRRORS) - {"wandb", "mlflow"}):
    raise ValueError(f"HEADROOM_MIRRORS names {_unknown[0]!r}; allowed: wandb, mlflow, by commas")

HEADROOM_WEBHOOK_NETWORKS = env.list("HEADROOM_WEBHOOK_NETWORKS", default=[])
"""Private networks that webhooks may be sent into, such as 10.1.0.0/16; by themselves they go to public addresses only."""
for _network in HEADROOM_WEBHOOK_NETWORKS:
    ipaddress.ip_network(_network)  # a slip is reported now, by the address that is wrong, and not when something is to be sent
HEADROOM_METRICS_TOKEN = env.str("HEADROOM_METRICS_TOKEN", default="")
"""Bearer token of a scraper of /metrics; without one only administrators' API tokens open it."""

AUTHENTICATION_BACKENDS = ["webapp.accounts.signing_in.backends.ThrottledBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "webapp.accounts.signing_in.passwords.GuessablePasswordValidator"},
]
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "home"
LOGOUT_REDIRECT_URL = "login"

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "static/"
STATIC_ROOT = HEADROOM_HOME / "static"
STATICFILES_DIRS = [BASE_DIR / "static"]
SERVESTATIC_KEEP_ONLY_HASHED_FILES = True
SERVESTATIC_SKIP_COMPRESS_EXTENSIONS = ("png", "map")
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "webapp.http.static_files.HashedStaticFiles"},
}

DATA_UPLOAD_MAX_MEMORY_SIZE = 1024 * 1024
FILE_UPLOAD_PERMISSIONS = 0o600
FILE_UPLOAD_TEMP_DIR = HEADROOM_HOME / "spool"
FILE_UPLOAD_TEMP_DIR.mkdir(mode=0o700, exist_ok=True)

SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_AGE = 12 * 3600
SECURE_CONTENT_TYPE_NOSNIFF = True
if PRODUCTION:
    SESSION_COOKIE_NAME = "__Host-sessionid"
    CSRF_COOKIE_NAME = "__Host-csrftoken"
    SESSION_COOKIE_SECURE = True
    CSRF_COOKIE_SECURE = True
    SECURE_SSL_REDIRECT = env.bool("HEADROOM_SSL_REDIRECT", default=True)
    SECURE_HSTS_SECONDS = 31_536_000
    SECURE_HSTS_INCLUDE_SUBDOMAINS = True
    SECURE_HSTS_PRELOAD = True
    if HEADROOM_BEHIND_PROXY:
        SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")

# Plotly inserts one empty <style> and fills it through the CSSOM; the hash is that of the empty text.
_EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [NONE],
        "script-src": [SELF],
        "style-src": [SELF, _EMPTY_STYLE],
        "img-src": [SELF, "data:", "blob:"],
        "connect-src": [SELF],
        "font-src": [SELF],
        "form-action": [SELF],
        "base-uri": [NONE],
        "frame-ancestors": [NONE],
        "object-src": [NONE],
    }
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "filters": {"limit_refusals": {"()": "webapp.http.log_limits.LimitRefusals"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["limit_refusals"]}},
    "root": {"handlers": ["stderr"], "level": env.str("HEADROOM_LOG_LEVEL", default="INFO")},
    "loggers": {
        # Django's own handlers print only under DEBUG, or send mail
        "django": {"handlers": [], "level": "INFO", "propagate": True},
        "django.server": {"handlers": [], "level": "INFO", "propagate": True},
        # each 4xx at WARNING would let anyone fill the log
        "django.request": {"level": "ERROR"},
        # they log whole addresses, and those that a hub redirects to hold the right to read a file
        "httpx": {"level": "WARNING"},
        "httpcore": {"level": "WARNING"},
    },
}
