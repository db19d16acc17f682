"""The format "echostore" in a session that allows sources to take filters."""

from pyspark_echostore import DefaultSource


class FilteredSource(DefaultSource):
    """Reads of blocks only what filters leave."""

    filters = True
