"""Celery's settings, one home for the side that sends hints (web, reconciler) and the side that receives them (worker).

A message is only a hint: early acknowledgement, no results, ids only. Late acknowledgement would run long jobs twice after the
visibility timeout, and with Celery 5.7.0 a broker outage during such a task ends the worker
(https://docs.celeryq.dev/en/stable/getting-started/backends-and-brokers/redis.html, celery #5935).
"""

from typing import Any

RUN_JOB_TASK = "headroom.run_job"
QUEUE = "headroom"


def broker_url(redis_url: str) -> str:
    """Kombu spells a Unix socket ``redis+socket://``; redis-py spells it ``unix://``."""
    if redis_url.startswith("unix://"):
        return "redis+socket://" + redis_url.removeprefix("unix://")
    return redis_url


def celery_settings(redis_url: str) -> dict[str, Any]:
    return {
        "broker_url": broker_url(redis_url),
        "task_default_queue": QUEUE,
        "task_acks_late": False,
        "task_reject_on_worker_lost": False,
        "task_ignore_result": True,
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # a broker that has no disk or memory left, or still loads, answers with an error, and is as good as away
        "broker_channel_error_retry": True,
        "broker_pool_acquire_timeout": 5,
        "broker_transport_options": {
            "visibility_timeout": 3600,
            "global_keyprefix": "q:",
            "socket_keepalive": True,
            "socket_connect_timeout": 5,
            "health_check_interval": 25,
        },
        "visibility_timeout": 3600,
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_accept_content": ["json"],
        "event_serializer": "json",
        "worker_send_task_events": False,
        "worker_enable_remote_control": False,
        "worker_max_tasks_per_child": 50,
        "worker_max_memory_per_child": 400_000,
        "worker_eta_task_limit": 100,
        "task_publish_retry_policy": {"max_retries": 2, "interval_start": 0.1, "interval_max": 0.5},
    }
