"""What the pipeline leaves behind: immutable files, and one record per commit that names them.

    OUT/epoch=3/attempt=<uuid>/items/<sha256>.parquet     written and synced by tasks, named by nobody yet
    OUT/epoch=3/attempt=<uuid>/lease                      held by the driver that works on it
    OUT/epoch=3/attempt=<uuid>/decision                   `commit` or `collect`, whichever came first
    OUT/commits/3.json                                    made once, exclusively: from here on the files count

    layout    names                     files     writing and checking one file
    record    the commit as JSON        attempt   from the first file to the commit
    reading   what a commit names       garbage   what no commit will ever name

Invariants, which the tests cite:

    1  A number has one commit. Whoever comes second is told so and has changed nothing.
    2  A commit's files were durable before the commit was visible, and are never changed or removed after it.
    3  A commit names the hash of the one before it, and carries only files that that one named.
    4  A reader opens what a commit names and nothing else, and checks the hash of what it opens.
    5  An attempt commits or is collected, never both.
"""
