"""A limit on everything that somebody else wrote. Checked before memory is spent."""

RECORD_BYTES_MAX = 8 << 20
"""A JSON record (run, close, commit, receipt, generation)."""

ISLAND_RECORD_BYTES_MAX = 64 << 10
"""A receipt or a departure, of which every pass may read many. Our own have less than half of it, with the longest
cursor of the dearest characters."""

CURSOR_CHARS_MAX = 4096
"""The opaque data cursor that an island puts into its receipts."""

SAFETENSORS_HEADER_BYTES_MAX = 16 << 20
"""The JSON header of a safetensors file."""

PSEUDO_GRADIENT_ABS_MAX = 1e9
"""A value of a contribution. One beyond is no training progress, and would take the arithmetic that follows out of
fp32."""

TENSORS_MAX = 100_000
"""Tensors of a model."""

TENSOR_ELEMENTS_MAX = 1 << 34
"""Elements of one tensor."""

FRAGMENTS_MAX = 9_999
"""Fragments of a run: four digits in object names."""

PARTS_MAX = 1_024
"""Payload objects of one contribution."""

CONTRIBUTIONS_PER_ISLAND_MAX = 8
"""Contributions of one island to one fragment that a single close takes; the rest waits for the next."""

ISLANDS_MAX = 10_000
"""Islands that one run tracks; more are not admitted."""
