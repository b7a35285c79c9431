"""Addresses of the pages."""

from django.contrib.auth.views import LoginView, LogoutView, PasswordChangeView
from django.urls import path, reverse_lazy

<<<<<<< HEAD
from webapp.pages.views import catalog, compare, generate, job, jobs, new_job, plans, queue, tokens
=======
from webapp.pages.views import (
    audit,
    catalog,
    compare,
    generate,
    job,
    jobs,
    new_job,
    people,
    projects,
    queue,
    tokens,
    webhooks,
)
>>>>>>> 429e01a (Projects, roles, token scopes, one permission table, an audit trail, webhooks and metrics)

urlpatterns = [
    path("", jobs.home, name="home"),
    path("login/", LoginView.as_view(template_name="login.html", redirect_authenticated_user=True), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path(
        "password/",
        PasswordChangeView.as_view(template_name="accounts/password.html", success_url=reverse_lazy("jobs")),
        name="password",
    ),
    path("jobs/", jobs.job_list, name="jobs"),
    path("jobs/new/", new_job.new_job, name="job_new"),
    path("jobs/new/price/", new_job.price, name="job_price"),
    path("jobs/new/model/", new_job.upload_model_here, name="job_new_model"),
    path("jobs/new/dataset/", new_job.upload_dataset_here, name="job_new_dataset"),
    path("jobs/compare/", compare.compare_page, name="job_compare"),
    path("plans/", plans.plans_page, name="plans"),
    path("plans/cards/", plans.plans_cards, name="plans_cards"),
    path("plans/step/", plans.plans_step, name="plans_step"),
    path("jobs/new/generate/", generate.new_generate, name="generate_new"),
    path("jobs/new/generate/price/", generate.price_generate, name="generate_price"),
    path("jobs/new/generate/prompts/", generate.upload_prompts_here, name="generate_prompts"),
    path("jobs/<slug:job_id>/", job.job_page, name="job"),
    path("jobs/<slug:job_id>/head/", job.job_head, name="job_head"),
    path("jobs/<slug:job_id>/tabs/<slug:tab>/", job.job_tab, name="job_tab"),
    path("jobs/<slug:job_id>/tables/<slug:chart>/", job.job_table, name="job_table"),
    path("jobs/<slug:job_id>/tables/<slug:chart>.csv", job.job_csv, name="job_csv"),
    path("jobs/<slug:job_id>/cancel/", job.job_cancel, name="job_cancel"),
    path("jobs/<slug:job_id>/pause/", job.job_pause, name="job_pause"),
    path("jobs/<slug:job_id>/resume/", job.job_resume, name="job_resume"),
    path("jobs/<slug:job_id>/retry/", job.job_retry, name="job_retry"),
    path("queue/", queue.queue_page, name="queue"),
    path("jobs/<slug:job_id>/move/", queue.queue_move, name="queue_move"),
    path("models/", catalog.model_list, name="models"),
    path("datasets/", catalog.dataset_list, name="datasets"),
    path("machines/", catalog.machine_list, name="machines"),
    path("tokens/", tokens.token_list, name="tokens"),
    path("tokens/<slug:token_id>/revoke/", tokens.token_revoke, name="token_revoke"),
    path("projects/", projects.project_list, name="projects"),
    path("projects/work-in/", projects.work_in, name="work_in"),
    path("projects/<slug:project_id>/", projects.project_page, name="project"),
    path("projects/<slug:project_id>/members/", projects.member_set, name="member_set"),
    path("projects/<slug:project_id>/members/remove/", projects.member_remove, name="member_remove"),
    path("projects/<slug:project_id>/audit/", audit.project_audit, name="project_audit"),
    path("projects/<slug:project_id>/webhooks/", webhooks.webhook_list, name="webhooks"),
    path("webhooks/<slug:webhook_id>/", webhooks.webhook_page, name="webhook"),
    path("webhooks/<slug:webhook_id>/secret/", webhooks.webhook_secret, name="webhook_secret"),
    path("webhooks/<slug:webhook_id>/test/", webhooks.webhook_test, name="webhook_test"),
    path("webhooks/<slug:webhook_id>/switch/", webhooks.webhook_switch, name="webhook_switch"),
    path("webhooks/<slug:webhook_id>/delete/", webhooks.webhook_delete, name="webhook_delete"),
    path("deliveries/<slug:delivery_id>/replay/", webhooks.delivery_replay, name="delivery_replay"),
    path("audit/", audit.audit_page, name="audit"),
    path("people/", people.people_list, name="people"),
    path("people/change/", people.people_change, name="people_change"),
]
