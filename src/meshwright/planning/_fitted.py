"""Hold the constants of the closed form: formats, and what was read off compiled candidates."""

FP32, NARROW = 4, 2  # bytes of a parameter, and of an activation in 16 bits
MOST_DEVICES = 10**6
ATTENTION_BACKWARD = 2.5  # of the forward FLOPs: five products where forward has two

# Bytes that the fused elementwise kernels of a block read and write for each token: multiples of the width,
# of the MLP's hidden width, and of the heads' width. These, the constants below and `kept_bytes` were
# read off 96 compiled candidates of four models, which benchmarks/plan_bounds.py draws (seed 14); it scores
# others.
FORWARD_BYTES = (16.0, 8.0, 8.0)
BACKWARD_BYTES = (32.0, 20.0, 12.0)
MERGE_BYTES = 70.0  # that a hop of a ring reads and writes for each number of the heads' outputs
KERNELS, KERNELS_OF_A_HOP = 120, 20  # of a block, forward and backward, and for each hop of its ring
PIECES_OF_A_RING = 1.7  # between one piece for each device and two
# The next two were set beside one compiled step alone, 405B with 131,072 tokens (docs/dev/adr/0014);
# what `alternate-dots` keeps is counted.
PIECES_OF_GATHERED_KEYS = 5.0  # calls with a half of all keys, a quarter, ... are as fast as with a fifth
EXPOSED_GATHERS_OF_KEYS = 0.35  # of keys' and values' gathers and scatters over `context`, what nothing hides
# Of the gathers of weights, what the compiler's schedule hides behind computation. Fitted: the median of
# eleven compiled programs that fit (8B and 70B, `fsdp` alone and with each other axis), hiding 71 to 97 %.
HIDDEN = 0.9
FORWARD_AND_BACKWARD = 2.5  # messages over `tensor`, in units of a forward pass's
PASSES_IN_PIPELINE = 3.0  # the same in a pipeline whose stages do not recompute everything
# What a pipeline waits for, in the same units: a constant; for each unit of forward products by which the
# messages are longer than a share of them; and for each stage by microbatch, in ticks that only run forward.
# Without and with everything recomputed. Read off the pipelines of records/2026-11-25_tensor_messages.toml.
KEPT_IN_PIPELINE = (0.2, 1.5, 0.6, 0.7)
FULL_IN_PIPELINE = (0.4, 1.0, 0.25, 1.5)
SUMS_OVER_CONTEXT = 1.4  # of the exposed sums of one microbatch's gradients over `context`
PASSES_OF_SLOTS = 6.0  # over what a pipeline keeps: written, copied into a slot and out of it, read
REPEATED_IN_PIPELINE = 0.9  # of the forward products, under `full`; without stages, all but the last
EXPOSED = 0.75  # of the messages over `tensor` and `expert`, what nothing hides
# Where a candidate needs more memory than a device has, XLA hides no message behind computation, and repeats
# work of its own accord: the head's forward product twice (five products for three), and in a pipeline that
# keeps products, the gate's once. Read off 72 compiled candidates of the same models (seed 15).
HEAD_OVER_MEMORY = 5 / 3
SUM_BYTES = 16.0  # for each number of the gradients that a microbatch adds to a float32 sum
OVERLAP = 0.3  # of attention, what hides the ring
HEAD_BYTES = 10.0  # read and written for each logit: cast, maximum, exponential, gradient
STATE_PASSES = 7  # arrays of 4 bytes that the update reads or writes for each parameter: Adam's
