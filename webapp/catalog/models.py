"""The rows that jobs are made of: models, datasets, machines, and the profiles that plans are priced with."""

from django.conf import settings
from django.db import models

from webapp.accounts.in_project import InProject
from webapp.ids import new_dataset_id, new_machine_id, new_model_id, new_upload_id


class Model(InProject):
    """A submitted model: a validated config, perhaps with weights and a tokenizer, in its own folder."""

    id = models.CharField(primary_key=True, max_length=48, default=new_model_id)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.CASCADE)
    """None for what ships with the program; everyone sees those."""
    name = models.CharField(max_length=200)
    preset = models.CharField(max_length=80, blank=True)
    """Name of the bundled preset this row stands for, else empty."""
    model_type = models.CharField(max_length=80)
    config = models.JSONField()
    """The validated config, written afresh from allowed keys."""
    unread = models.JSONField(default=list)
    """Settings of the config.json that was sent which the validated one lacks, in sentences (``models/unread.py``)."""
    fingerprint = models.CharField(max_length=64)
    """sha256 of the canonical config; profiles are kept under it."""
    folder = models.CharField(max_length=500)
    """Relative to HEADROOM_HOME: config.json, weights (links where they were linked), tokenizer.json and the files beside it."""
    linked_from = models.CharField(max_length=1000, blank=True)
    """The folder on the server whose weights are linked; empty where they are the service's own."""
    linked_files = models.JSONField(default=list)
    """Facts on the linked files when they were added (``optimizer/models/files/linked_files.py``)."""
    generation = models.JSONField(default=dict)
    """Settings of its generation_config.json that jobs use (``optimizer/models/files/generation_config.py``)."""
    has_weights = models.BooleanField(default=False)
    has_tokenizer = models.BooleanField(default=False)
    has_chat = models.BooleanField(default=False)
    """True where its folder holds chat.json, the conversation format of its tokenizer_config.json."""
    num_parameters = models.BigIntegerField(null=True)
    """Known once profiled."""
    from_job_id = models.CharField(max_length=48, blank=True)
    """The run that trained it; empty for what was uploaded. Jobs know of this app, not the reverse, so it is no foreign key."""
    created_at = models.DateTimeField(auto_now_add=True)
    deleted_at = models.DateTimeField(null=True)
    """Set: nobody sees it any more; for some days it can be had back (``removal.py``)."""

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index(fields=["fingerprint"]),  # which models share a profile
            models.Index(fields=["from_job_id"], name="model_from_job"),  # what a run became, on its page
        ]
        constraints = [
            # set-up may run twice at once; each preset is one row
            models.UniqueConstraint(fields=["preset"], condition=~models.Q(preset=""), name="preset_once")
        ]

    def __str__(self) -> str:
        return self.name


class Profile(models.Model):
    """The profile of one architecture, traced once by a worker; pricing needs only this."""

    fingerprint = models.CharField(primary_key=True, max_length=64)
    model_fingerprint = models.CharField(max_length=64, blank=True, db_index=True)
    """The architecture's, whatever adapters, rows or objective were traced; empty in rows older than this column until they are
    asked for."""
    document = models.JSONField(null=True)
    """optimizer.profile.Profile as JSON; None while it is being made or when it failed."""
    document_sha256 = models.CharField(max_length=64, blank=True)
    """Hash of the document's JSON, which can be megabytes long: shows whether it changed without reading it."""
    version = models.IntegerField(default=0)
    """optimizer.profile.PROFILE_VERSION of the document; another one is traced again."""
    error = models.JSONField(null=True)
    """HeadroomError.to_json() of a failed trace."""
    job_id = models.CharField(max_length=48, blank=True)
    """The job that makes it; jobs know of this app, not the reverse, so it is no foreign key."""
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return self.fingerprint[:12]


class Dataset(InProject):
    """A submitted text dataset, kept as the file that was sent."""

    id = models.CharField(primary_key=True, max_length=48, default=new_dataset_id)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.CASCADE)
    """None for what ships with the program."""
    name = models.CharField(max_length=200)
    format = models.CharField(
        max_length=10,
        choices=[
            ("txt", "text"),
            ("jsonl", "JSON lines"),
            ("json", "JSON"),
            ("csv", "CSV"),
            ("parquet", "Parquet"),
            ("prompts", "prompts, JSON lines"),
        ],
    )
    """``prompts`` is what generate jobs take, the others what training takes."""
    file = models.CharField(max_length=500)
    """Relative to HEADROOM_HOME, or absolute below the program for what ships with it."""
    sha256 = models.CharField(max_length=64)
    num_bytes = models.BigIntegerField()
    num_documents = models.BigIntegerField(null=True)
    """For prompts, how many there are."""
    columns = models.JSONField(null=True)
    """Columns by what they hold, as a person said it (``{part: column}``); null where it is found."""
    facts = models.JSONField(default=dict)
    """Facts found in the file (``optimizer.data.inspect.DatasetFacts``; for prompts ``inspect_prompts.PromptFacts``)."""
    preview = models.TextField(blank=True)
    """The first 2,000 characters, for people."""
    created_at = models.DateTimeField(auto_now_add=True)
    deleted_at = models.DateTimeField(null=True)
    """The same as for a model."""

    class Meta:
        ordering = ["-created_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["name"], condition=models.Q(owner__isnull=True), name="bundled_dataset_name_once"
            )
        ]

    def __str__(self) -> str:
        return self.name


class Upload(InProject):
    """Files of a model or dataset on their way here, piece by piece (``uploads.py``)."""

    id = models.CharField(primary_key=True, max_length=48, default=new_upload_id)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    kind = models.CharField(max_length=10, choices=[("model", "model"), ("dataset", "dataset")])
    name = models.CharField(max_length=200)
    """Name of the model or dataset that it will be."""
    purpose = models.CharField(max_length=10, default="text")
    """Purpose of a dataset: ``text`` or ``prompts``."""
    files = models.JSONField()
    """``[{"name", "num_bytes", "sha256"}]``; how much of each is here, the files themselves say."""
    source = models.JSONField(default=dict)
    """For one that the service fetches by itself, from where and how far it is (``hub/download.py``); else empty."""
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)
    """When a piece last came; one that nothing comes for is removed."""

    def __str__(self) -> str:
        return self.name


class PromptTokens(models.Model):
    """Token counts of a file's prompts for one model, counted once: prices rest on them."""

    dataset = models.ForeignKey(Dataset, on_delete=models.CASCADE)
    model = models.ForeignKey(Model, on_delete=models.CASCADE)
    counts = models.JSONField()
    """``[[prompt tokens, new tokens or null, lines], ...]`` (``optimizer.data.prompt_tokens.TokenCount``)."""

    class Meta:
        constraints = [models.UniqueConstraint(fields=["dataset", "model"], name="prompt_tokens_once")]

    def __str__(self) -> str:
        return f"{self.dataset_id} for {self.model_id}"


class Machine(models.Model):
    """A machine that has run a worker: what it is, how fast it was measured, how well it was predicted."""

    id = models.CharField(primary_key=True, max_length=48, default=new_machine_id)
    name = models.CharField(max_length=200, unique=True)
    document = models.JSONField()
    """optimizer.hardware.machine.Machine as JSON."""
    calibration = models.JSONField(default=dict)
    """Corrections learned from finished runs (optimizer.hardware.calibration): factors by kind of time, the runs, mean
    absolute errors."""
    first_seen_at = models.DateTimeField(auto_now_add=True)
    last_seen_at = models.DateTimeField()
    """Heartbeat of its worker, by the database's clock."""
    draining = models.BooleanField(default=False)
    used_bytes = models.JSONField(default=list)
    """By device, memory in use by whatever program, as the cards' driver said with the last heartbeat; empty where none does.
    More than a card has where its driver does not answer for it."""
    others_bytes = models.JSONField(default=list)
    """The same of each device when a job last began there with none beside it: what other programs held. It stays apart from what
    jobs hold, which grows for a while after they were claimed."""

    def __str__(self) -> str:
        return self.name


class Link(models.Model):
    """The network between two machines: as their workers measured it, and the probe of it that is due or under way.

    One of the two listens in a probe, the other connects. ``webapp/jobs/links`` moves it.
    """

    listener = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="links_listened")
    connector = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="links_connected")
    asked_at = models.DateTimeField(null=True)
    """A probe is due since; None where none was asked for since the last one."""
    offer = models.JSONField(null=True)
    """The place at which the listener listens at this moment, and the probe's token (``Offer``). Gone with its end."""
    offer_ends_at = models.DateTimeField(null=True)
    checked_at = models.DateTimeField(null=True)
    """The end of the last probe, whatever came of it."""
    failure = models.TextField(blank=True)
    """Why the last probe did not reach the other machine, with what to do; empty where it did."""
    measured_at = models.DateTimeField(null=True)
    round_trip_s = models.FloatField(null=True)
    bytes_per_s_by_size = models.JSONField(default=list)
    """Pairs of a size in bytes and the rate in the slower direction, sizes rising."""

    class Meta:
        constraints = [models.UniqueConstraint(fields=["listener", "connector"], name="link_once_per_pair")]

    def __str__(self) -> str:
        return f"{self.listener_id} and {self.connector_id}"
