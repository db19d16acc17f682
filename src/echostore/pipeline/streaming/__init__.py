"""Streaming: item tables that follow a lake, micro-batch by micro-batch, with epochs by policy.

    lake ──► Structured Streaming: offsets are timeframes ──► one job a micro-batch ──► an overlay, published at once
                                                              the stages of the batch,
                                                              inside of few tasks
         ──► now and then an ordinary run of the pipeline ──► a commit: epochs, CIDs, all tables

The overlay (`echostore.pipeline.output.overlay`) lies over the newest commit. It holds item states and item tables of what
is newer, costs what is new, and is gone when the next commit has taken it in. A micro-batch that is done twice, or that
dies at any step, changes nothing: what counts is where the overlay's own cuts are, not what Spark's checkpoint says.
"""
