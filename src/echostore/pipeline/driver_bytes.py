"""How much comes to the driver: results of tasks, as Spark's own status counts them.

Messages and items never do. What does (plans, cuts of feeds, names of files) must stay small however many messages there
are; a run that collects more than the bound below has a defect, and says so before it commits.
"""

from collections.abc import Iterator
from typing import Any

DRIVER_BYTES_MAX = 64 << 20


def status_of_stages(spark: Any) -> Iterator[Any]:
    """What Spark itself knows about the stages it ran: the last thousand, newest first."""
    context = spark.sparkContext
    gateway = context._gateway  # pyspark does not show Spark's own status
    every = None, False, False, gateway.new_array(gateway.jvm.double, 0), gateway.jvm.java.util.ArrayList()
    stages = context._jsc.sc().statusStore().stageList(*every)
    for at in range(stages.size()):
        yield stages.apply(at)


class DriverBytes:
    """Counts what tasks sent to the driver since it was made. Without Spark there is no driver apart from the tasks."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark
        self._seen: dict[int, int] = {}
        self._before = self._total()

    def since(self) -> int:
        """Bytes so far. Ask now and then: Spark forgets stages after a thousand."""
        return self._total() - self._before

    def _total(self) -> int:
        for stage in () if self._spark is None else status_of_stages(self._spark):
            number = stage.stageId()
            self._seen[number] = max(self._seen.get(number, 0), stage.resultSize())
        return sum(self._seen.values())
