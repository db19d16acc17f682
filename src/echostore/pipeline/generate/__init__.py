"""Lakes out of nothing: valid, signed parties of any size with known faults, the same for the same arguments.

    shape.py      what is asked for              schedule.py   who writes what when, who hears of whom
    keys.py       keys out of the seed           contents.py   what is written to properties
    founding.py   control feeds                  edits.py      what is written to texts, lists and logs
    party.py      one party, round by round      encoding.py   messages as bytes, fast
    feeds.py      links, heads, rows             spool.py      rows of feeds that grow side by side
    faults.py     liars and broken disks         lakes.py      all parties into a lake

For tests and measurements. Nothing in it is secret: the seed is the key to all it makes.
"""
