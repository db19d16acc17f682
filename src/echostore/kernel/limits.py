"""The limits that every peer and Spark agree on, each with its reason.

A limit that decides validity is part of the format: changing one changes which blocks are valid. They live together
so that nobody changes one by accident.
"""

BLOCK_BYTES_MAX = 8 * 1024 * 1024
"""One block's payload. Large values belong in blobs; a receiver allocates this much before it can check a hash."""

APPEND_BLOCKS_MAX = 1024
"""Blocks under one head signature: a receiver buffers this many before it can verify them."""

APPEND_BYTES_MAX = 16 * 1024 * 1024
"""Bytes under one head signature, for the same reason."""

OPERATIONS_MAX = 65_536
"""Operations in one message: the position has 16 bits in an item id."""

DEPENDENCIES_MAX = 65_536
"""Entries in one message's timeframe change: a party with more live feeds needs more than one message to name them."""

VALUE_DEPTH_MAX = 32
"""Nesting of lists and maps in a value. Each level takes two of protobuf's hundred, and the value sits a few deep."""

KEY_CHARACTERS_MAX = 1024
"""One step of a property path."""

PATH_STEPS_MAX = 64
"""Steps of a property path; together with VALUE_DEPTH_MAX it bounds the depth of any property."""

VALUE_BYTES_MAX = 1024 * 1024
"""One property value, encoded. What is larger is a blob."""

SEQ_MAX = (1 << 47) - 1
"""seq and a 16-bit position make a 63-bit local number; the top bit is for arcs."""

DEPTH_MAX = (1 << 53) - 1
"""Exact in a double, so that JSON and JavaScript can carry it."""

BLOB_BYTES_MAX = 1024 * 1024
"""One blob; larger content is a list of them."""

CREDENTIALS_MAX = 256
"""Credentials in one control message."""
