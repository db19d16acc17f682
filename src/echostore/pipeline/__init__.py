"""The data pipeline on Spark: blocks of many parties into verified item states, snapshots with CIDs, and tables.

    lake ──► control ──► verify ──► order ──► demux ──► reduce ──► snapshot ──► commit
             admission   links,     closed    items     states     CIDs         one record
                         heads      cut

Importing this package starts nothing: Spark and Java are loaded by `echostore.pipeline.session`.
"""
