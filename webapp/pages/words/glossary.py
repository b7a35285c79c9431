"""The words of the pages, each in a sentence or two. A test holds them to what the program itself can say."""

from dataclasses import dataclass
from typing import Final

from optimizer.plan.techniques import DECLARATIONS
from webapp.pages.presentation import STATE_MEANINGS


@dataclass(frozen=True, kw_only=True)
class Words:
    """Terms of one subject, in the order in which a reader meets them."""

    title: str
    terms: tuple[tuple[str, str], ...]
    """The term as the pages write it, and what it means."""


GLOSSARY: Final = (
    Words(
        title="What lives in memory",
        terms=(
            ("weights", "The numbers that a model consists of; training changes them."),
            ("gradients", "How each weight should change; they appear in the backward pass, one for each."),
            ("optimizer state", "What the optimizer remembers of earlier steps; AdamW keeps two numbers for each weight."),
            ("activations", "What the forward pass keeps for the backward pass: more with the batch and the sequence length."),
            ("logits and loss", "A score for every word of the vocabulary at every position, and what is computed of them."),
            ("KV cache", "In a generation, the keys and values of all tokens so far, so that they need not be computed again."),
            ("temporaries", "Inputs, working space of single ops, and what rounding takes: counted, not decided."),
        ),
    ),
    Words(
        title="Where it lives",
        terms=(
            ("device", "The card's own memory, fast and small. Without a card, a counted part of the host plays it."),
            ("host", "The memory of the machine that the card is in: larger, and reached over a link."),
            ("disk", "The folder for scratch files: larger still, and slower."),
            ("remote store", "Another machine's memory, reached over the network."),
            ("budget", "The most bytes that a job may hold in a place. A run that would go over it stops."),
            ("peak", "The most bytes that are there at one moment of a step. It decides whether something fits."),
        ),
    ),
    Words(
        title="What can be done to save memory",
        terms=(
            ("plan", "What is decided about each of these: how long it lives, where, in how many bits, and the micro-batch."),
            ("kept", "Stays on the device until it is needed. Letter K."),
            ("recomputed", "Dropped, and computed again in the backward pass: less memory, more time. Letter R."),
            ("recomputed in part", "Only what is cheap to compute is dropped; products and attention are kept. Letter S."),
            ("offloaded", "Moved away until it is needed: O to the host, D to the disk, N to a remote store."),
            ("streamed", "Of weights: each block's come to the device when it is their turn, and go again."),
            ("block", "One of the alike layers that a model is a stack of; blocks are counted from 1."),
            ("micro-batch", "The sequences that are computed at once. Several make a batch (accumulation)."),
            ("loss in chunks", "The scores of all positions never exist together."),
            ("lossless", "The numbers are those of plain training in fp32. What is not must be allowed first."),
            ("adapters", "Small matrices trained beside frozen weights (LoRA); with the weights packed in 4 bits: QLoRA."),
        ),
    ),
    Words(
        title="Techniques that a job may forbid",
        terms=tuple((declared.label, declared.sentence) for declared in DECLARATIONS.values()),
    ),
    Words(
        title="What is said about a plan",
        terms=(
            ("fits", "All of the predicted interval is under the budget."),
            ("tight", "The prediction is under the budget, and the upper end of its interval is not."),
            ("does not fit", "The prediction is over the budget."),
            ("unknown", "Nothing is known yet, or cannot be; it forbids nothing."),
            ("chosen", "The fastest plan that was found within the budget and what is allowed."),
            ("baseline", "A plan as people write it by hand, for comparison."),
            ("frontier", "The plans that no other beats in both time and memory."),
            ("calibration", "What finished runs taught about how long things take on a machine."),
        ),
    ),
    Words(
        title="What takes time",
        terms=(
            ("lane", "Something that can be busy while others are."),
            ("compute", "The work on the device itself."),
            ("copy in", "From the host to the device."),
            ("copy out", "From the device to the host."),
            ("network", "To and from a remote store."),
            ("stall", "Time in which compute stands still and waits for another lane."),
            ("matmul", "Products of matrices in fp32; in 16 bits they are called half precision."),
            ("half precision", "Products and attention in 16 bits."),
            ("attention", "Each token looking at the others."),
            ("elementwise", "Sums, products and functions of single numbers."),
            ("reduction", "Sums, norms and softmax over many numbers."),
            ("gather", "Looking up rows, as an embedding does."),
            ("quantization", "Packing numbers into fewer bits and unpacking them."),
            ("dispatch", "What Python and torch take for each op beside the op itself."),
            ("hooks", "What saving memory takes in Python: entering a block again, packing what goes away."),
            ("optimizer", "The update of the weights."),
            ("allocation", "Memory that is touched for the first time."),
            ("unplaced", "Of a prediction that says how long its step is, and not what that is spent on."),
        ),
    ),
    Words(
        title="States of a job",
        terms=(
            *((state, f"{meaning[:1].upper()}{meaning[1:]}.") for state, meaning in STATE_MEANINGS.items()),
            ("paused", "Waits, and may not start before somebody resumes it."),
            ("attempt", "One try at a job. The next one goes on from the newest checkpoint."),
            ("checkpoint", "All that is needed to go on from a step to the same weights."),
        ),
    ),
    Words(
        title="Training and generating",
        terms=(
            ("step", "One batch forward and backward, and one update of the weights."),
            ("token", "A piece of text as the model reads it, often a word or part of one."),
            ("sequence length", "Tokens that are seen together."),
            ("validation loss", "The loss on text that is kept back from training."),
            ("warm-up", "Steps in which the learning rate rises from nothing."),
            ("prefill", "The pass over a prompt, before its first token."),
            ("prompt", "One line of the file that a generation answers."),
        ),
    ),
)
