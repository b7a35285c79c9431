"""Declares the decisions of both layouts: their techniques, words and faces, for the register of all (``plan/techniques.py``)."""

from typing import Final

from optimizer.plan.knob import Condition, Face, Knob, TechniqueDeclaration, Use, differs, equals, exceeds, one_of

_GROUP: Final = "Several devices"
TECHNIQUES: Final = (
    TechniqueDeclaration(
        name="data_parallel",
        label="share the batch among devices",
        sentence="Gives each device a part of the batch and sums their gradients, which crosses the link between them.",
        group=_GROUP,
        num_devices=2,
    ),
    TechniqueDeclaration(
        name="shard_state",
        label="optimizer state shared out (ZeRO-1)",
        sentence="Gives each trained tensor one device that keeps its optimizer state, updates it and sends the others its new "
        "weights.",
        group=_GROUP,
        lowers=("optimizer_state",),
        num_devices=2,
    ),
    TechniqueDeclaration(
        name="shard_gradients",
        label="gradients shared out (ZeRO-2)",
        sentence="Sums each gradient on the device that updates its tensor, after every micro-batch; the others let theirs go.",
        group=_GROUP,
        lowers=("gradients",),
        num_devices=2,
    ),
    TechniqueDeclaration(
        name="shard_weights",
        label="weights shared out (ZeRO-3)",
        sentence="Keeps each weight of a block on one device alone, trained or not, and sends it to the others for as long as "
        "the block runs.",
        group=_GROUP,
        lowers=("weights",),
        num_devices=2,
    ),
    TechniqueDeclaration(
        name="hybrid_shard",
        label="shared out within each machine (hybrid sharding)",
        sentence="Shares state, gradients or weights out among the devices of each machine alone; between machines each gradient "
        "is summed once, and no weights cross.",
        group=_GROUP,
        num_devices=4,
    ),
    TechniqueDeclaration(
        name="cut_model",
        label="cut the model over devices",
        sentence="Holds some of the blocks on each device, with all that belongs to them; hidden states go from one to the next, "
        "and several micro-batches keep all of them at work.",
        group=_GROUP,
        searches=("training", "generation"),
        lowers=("weights", "gradients", "optimizer_state", "activations"),
        num_devices=2,
    ),
    TechniqueDeclaration(
        name="share_blocks",
        label="share each block among devices",
        sentence="Gives each device some heads and neurons of every block, with all that belongs to them; all work on every "
        "sequence, and what they make crosses the link twice a block, forward and backward.",
        group=_GROUP,
        lowers=("weights", "gradients", "optimizer_state", "activations"),
        num_devices=2,
    ),
    TechniqueDeclaration(
        name="local_steps",
        label="synchronize every few steps",
        sentence="Lets each device take several steps alone and then brings their weights together (local SGD, DiLoCo), so that "
        "a slow link is used seldom; another training than one with every gradient summed.",
        group=_GROUP,
        loss="any",
        num_devices=2,
    ),
    TechniqueDeclaration(
        name="share_prompts",
        label="share prompts among whole copies",
        sentence="Holds a whole copy of the model on each device of one machine, and gives each a share of the prompts.",
        group=_GROUP,
        searches=("generation",),
        num_devices=2,
    ),
)
_IS_WHOLE: Final = (
    Condition(path="layout.stage_blocks", holds=equals(())),
    Condition(path="layout.tensor", holds=equals(1)),
)
_SHARES_STATE: Final = Condition(path="layout.data", holds=differs("replicated"))
KNOBS: Final = (
    Knob(
        path="layout.num_devices",
        plain=1,
        uses=(Use(technique="data_parallel", asks=exceeds(1), where=_IS_WHOLE),),
        num_devices=2,
        training=Face(label="Devices", help="each with a part of the batch or of the model"),
    ),
    Knob(
        path="layout.data",
        plain="replicated",
        words={
            "replicated": "all on each device",
            "zero1": "optimizer state shared out (ZeRO-1)",
            "zero2": "optimizer state and gradients shared out (ZeRO-2)",
            "zero3": "optimizer state, gradients and weights shared out (ZeRO-3)",
        },
        uses=(
            Use(technique="shard_weights", asks=equals("zero3")),
            Use(technique="shard_gradients", asks=one_of("zero2", "zero3")),
            Use(technique="shard_state", asks=differs("replicated")),
        ),
        num_devices=2,
        training=Face(label="State on several devices"),
    ),
    Knob(
        path="layout.replicas",
        plain=1,
        uses=(Use(technique="hybrid_shard", asks=exceeds(1), where=(_SHARES_STATE,)),),
        num_devices=2,
        training=Face(label="Replicas of what is shared", help="each among neighbouring devices, as those of one machine"),
    ),
    Knob(
        path="layout.stage_blocks",
        plain=(),
        uses=(Use(technique="cut_model", asks=differs(())),),
        num_devices=2,
        training=Face(label="Blocks by stage", help="of a model that is cut over devices, one stage or several on each"),
        generation=Face(label="Blocks by device", help="of a model that is cut over devices"),
    ),
    Knob(
        path="layout.schedule",
        plain="1f1b",
        words={
            "1f1b": "one forward, one backward (1F1B)",
            "gpipe": "all forward, then all backward (GPipe)",
            "breadth_first": "all micro-batches through a stage, then the next (breadth first)",
        },
        matters_where=(Condition(path="layout.stage_blocks", holds=differs(())),),
        num_devices=2,
        training=Face(label="Order of micro-batches", help="of a model that is cut over devices"),
    ),
    Knob(
        path="layout.tensor",
        plain=1,
        uses=(Use(technique="share_blocks", asks=exceeds(1)),),
        num_devices=2,
        training=Face(label="Devices that share each block", help="its heads and neurons, the whole batch on all of them"),
    ),
    Knob(
        path="layout.sync_every",
        plain=1,
        uses=(Use(technique="local_steps", asks=exceeds(1)),),
        num_devices=2,
        training=Face(label="Steps between synchronizations", help="1 shares every step; more is another training"),
    ),
    Knob(
        path="layout.sync_format",
        plain="fp32",
        words={"fp32": "32 bits", "bf16": "16 bits (bf16)", "int8": "8 bits (int8)"},
        matters_where=(Condition(path="layout.sync_every", holds=exceeds(1)),),
        num_devices=2,
        training=Face(label="Differences sent in", help="where devices synchronize every few steps"),
    ),
    Knob(
        path="layout.sync_rule",
        plain="average",
        words={"average": "the mean of all weights", "nesterov": "an outer step with momentum (DiLoCo)"},
        matters_where=(Condition(path="layout.sync_every", holds=exceeds(1)),),
        num_devices=2,
        training=Face(label="Devices go on from", help="where they synchronize every few steps"),
    ),
    Knob(
        path="layout.num_replicas",
        plain=1,
        uses=(Use(technique="share_prompts", asks=exceeds(1)),),
        num_devices=2,
        generation=Face(label="Copies of the model", help="each on a device of its own, with a share of the prompts"),
    ),
)
