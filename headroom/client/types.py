"""Types of the API's answers: a dictionary each, with the keys that ``docs/api.md`` lists.

Plans, predictions, specs and calibrations are documents of their own (``optimizer``'s ``Plan.from_json`` and
``Prediction.from_json`` read the first two) and stay plain dictionaries here.
"""

from typing import Any, Literal, NotRequired, TypedDict

Document = dict[str, Any]
State = Literal["queued", "starting", "running", "succeeded", "failed", "cancelled"]
Verdict = Literal["fits", "tight", "does_not_fit", "unknown"]


class Me(TypedDict):
    user: str
    is_admin: bool
    version: str


class Model(TypedDict):
    id: str
    name: str
    preset: str
    model_type: str
    num_parameters: int | None
    has_weights: bool
    has_tokenizer: bool
    has_chat: bool
    unread: list[str]
    """Settings of its config.json that no price covers, in sentences."""
    from_job: str | None
    """The run that trained it; None for what was uploaded."""
    linked_from: str | None
    """The folder on the server where its weights stay; None where the service keeps them."""
    generation: Document
    """Sampling that its makers ask for, used where a generate job says nothing."""
    created_at: str
    profile: Literal["ready", "pending", "failed"]


class ModelDetails(Model):
    """Details of one model, beside its row."""

    config: Document
    num_bytes: int
    """On the service's disk."""
    structure: Document
    """``optimizer.models.structure.Structure``."""


class Cancelled(TypedDict):
    """The answer to a request for one job's end among many."""

    id: str
    outcome: Literal["cancelled", "asked_to_stop", "already_asked", "ended", "forbidden", "not_found"]


class MethodNeed(TypedDict):
    """Device bytes for training or running a model in one way."""

    name: Literal["full", "lora", "qlora", "generate"]
    title: str
    what: str
    state: Literal["ready", "pending", "not_asked", "failed"]
    plain_bytes: int | None
    least_bytes: int | None
    message: str


class CardVerdicts(TypedDict):
    name: str
    memory_bytes: int
    verdicts: dict[str, Literal["fits", "fits_saving", "does_not_fit"] | None]
    """By method."""


class ModelCards(TypedDict):
    sequence_length: int
    methods: list[MethodNeed]
    cards: list[CardVerdicts]


class Dataset(TypedDict):
    id: str
    name: str
    format: Literal["txt", "jsonl", "json", "csv", "parquet", "prompts"]
    columns: dict[str, str] | None
    num_bytes: int
    num_documents: int | None
    preview: str
    sha256: str
    facts: Document
    created_at: str


class Deleted(TypedDict):
    id: str
    deleted_at: str
    restorable_until: str


class Device(TypedDict):
    kind: str
    name: str
    memory_bytes: int
    is_capped: NotRequired[bool]
    """True for a device that the CPU plays with memory of its own."""


class DeviceKind(TypedDict):
    device: Device
    num_devices: int


class PeerLink(TypedDict):
    kind: str
    bytes_per_s: float
    latency_s: float
    source: str


class Machine(TypedDict):
    id: str
    name: str
    device: Device
    num_devices: int
    """Devices like ``device``, which on the CPU share its memory unless each was given bytes of its own."""
    others: list[DeviceKind]
    """Kinds of devices beside the first."""
    peers: PeerLink | None
    last_seen_at: str
    online: bool
    draining: bool
    calibration: Document


class Holder(TypedDict):
    """A job at work on a machine; of someone else's the id and name are empty."""

    job_id: str
    name: str
    worker: str
    devices: list[int]
    needs_bytes: int
    bytes_by_category: dict[str, int]


class Occupancy(TypedDict):
    memory_bytes: int
    free_bytes: int
    holders: list[Holder]


class Within(TypedDict):
    num_runs: int
    nine_of_ten: float
    worst: float


class CheckedRun(TypedDict):
    job_id: str
    name: str
    ended_at: str | None
    predicted_bytes: int | None
    measured_bytes: int | None
    predicted_ms: float | None
    measured_ms: float | None


class Accuracy(TypedDict):
    peak: Within | None
    step: Within | None
    runs: list[CheckedRun]


class Link(TypedDict):
    """The network to another machine, as the workers of both measured it."""

    machine: str
    """The other one's name."""
    link: str
    """Rate and delay as a spec's ``link`` has them; empty where they were not measured."""
    round_trip_s: float | None
    bytes_per_s_by_size: list[list[float]]
    measured_at: str | None
    checked_at: str | None
    is_due: bool
    """It will be measured once no job is on either machine."""
    failure: str
    """Why the other machine was not reached the last time, and what to do."""


class MachineDetails(Machine):
    """Details of one machine, beside its row."""

    links: list[Link]
    memory: Occupancy
    accuracy: Accuracy


class OfferedOn(TypedDict):
    id: str
    name: str


class Offer(TypedDict):
    """One priced plan of ``POST /plans``."""

    id: str
    label: str
    chosen: bool
    verdict: Verdict
    machine: OfferedOn
    plan: Document
    prediction: Document
    explanation: list[str]
    lossless: bool


class Job(TypedDict):
    id: str
    name: str
    kind: Literal["train", "generate", "serve", "export"]
    state: State
    phase: str
    reason: str
    message: str
    error: Document | None
    is_terminal: bool
    cancel_requested: bool
    paused: bool
    priority: int
    attempt: int
    step: int
    num_steps: int
    eta_s: float | None
    summary: Document
    tags: list[str]
    notes: str
    created_at: str
    started_at: str | None
    finished_at: str | None
    spec: Document
    plan: Document | None
    prediction: Document | None
    machine: str | None
    links: dict[str, str]


class JobEvent(TypedDict):
    """One move of a job."""

    seq: int
    at: str
    actor: str
    kind: str
    from_state: str
    to_state: str
    reason: str
    message: str


class Artifact(TypedDict):
    id: str
    job_id: str
    name: str
    kind: str
    path: str
    """Place below the folder that a download goes to: ``model/config.json``."""
    num_bytes: int
    sha256: str
    created_at: str
    download: str


class Checkpoint(TypedDict):
    name: str
    kind: Literal["checkpoint"]
    step: int
    num_bytes: int
    sha256: str
    created_at: str


class AttemptMember(TypedDict):
    """The part of an attempt over several machines on one that does not lead it."""

    machine: str
    worker: str
    """Empty until a worker has taken it."""
    ranks: list[int]
    devices: list[int]
    is_lost: bool
    ended_at: str | None


class Attempt(TypedDict):
    """One try at a job by one worker, or by one on each of several machines."""

    number: int
    worker: str
    devices: list[int]
    """Places of the machine's devices that it used, counted from 0."""
    members: list[AttemptMember]
    """Its parts on other machines."""
    outcome: str
    cause: str
    """One of a closed list where memory ran out, else empty."""
    stage: str
    why: str
    change: str
    """Differences of its plan from the one before, in words."""
    resumed_from_step: int
    is_shared: bool
    plan: Document | None
    prediction: Document | None
    measured: Document | None
    error: Document | None
    tier: str
    peak_bytes: int | None
    """Most bytes that were held, or wanted where memory ran out."""
    budget_bytes: int | None
    started_at: str
    ended_at: str | None


class Metrics(TypedDict):
    steps: list[Document]
    evals: list[Document]
    generated: list[Document]
    timeline: Document | None


class WaitingJob(TypedDict):
    id: str
    name: str
    position: int
    priority: int
    reason: str
    sentence: str
    machines: list[str]


class Queue(TypedDict):
    num_waiting: int
    """Counted over all people."""
    num_own: int
    """Yours, on all pages."""
    waiting: list[WaitingJob]
    live: list[Document]


class Comparison(TypedDict):
    jobs: list[Document]
    differences: list[Document]
    outcomes: list[Document]
    costs: list[Document]
    unpriced: str


class UploadFile(TypedDict):
    name: str
    num_bytes: int
    sha256: str
    received_bytes: int


class Upload(TypedDict):
    """A model or dataset on its way."""

    id: str
    kind: Literal["model", "dataset"]
    name: str
    columns: str
    purpose: str
    files: list[UploadFile]
    piece_bytes: int
    max_piece_bytes: int
    source: Document | None
    """For one that the service fetches from the hub: ``hub``, ``commit``, ``state``, ``message``, in the end ``model``."""
    kept_until: str


Role = Literal["viewer", "member", "admin"]


class Token(TypedDict):
    """An API token without its text."""

    id: str
    name: str
    scope: Literal["read", "write", "admin"]
    project: str | None
    created_at: str
    expires_at: str
    last_used_at: str | None
    revoked_at: str | None


class Project(TypedDict):
    id: str
    name: str
    role: Role
    is_own: bool
    created_at: str


class Member(TypedDict):
    username: str
    role: Role
    since: str


class Person(TypedDict):
    username: str
    role: Role
    is_active: bool
    created_at: str
    last_login_at: str | None


class NewPerson(Person):
    password: str
    """Shown this once."""


class AuditRecord(TypedDict):
    id: str
    at: str
    actor: str
    token_id: str
    address: str
    action: str
    outcome: Literal["done", "refused"]
    target: str
    project: str
    detail: str


class Webhook(TypedDict):
    id: str
    project: str
    kind: Literal["webhook", "slack", "email"]
    url: str
    events: list[str]
    """Empty for all."""
    is_active: bool
    created_at: str


class NewWebhook(Webhook):
    secret: str
    """Shown this once."""


class Delivery(TypedDict):
    """One message of a webhook, and how it went."""

    id: str
    event: str
    state: Literal["pending", "delivered", "failed"]
    num_tries: int
    next_try_at: str | None
    status_code: int | None
    trouble: str
    duration_ms: int | None
    replay_of: str
    created_at: str
    tried_at: str | None
    body: str
