"""The coherence protocol: thin clients read and write a party through peers, without sockets, clocks or disks.

      root      owns durable state (a peer); one clock of ticks           root.py
       |  ^
 index |  | operations
 values v |
      edge      caches for others, mints nothing, may vanish              edge.py
       |  ^
       v  |
      leaf      serves one application                                    leaf.py

Each of the three is a machine: `receive(event)` returns effects. They are made of the same parts:

    holdings.py    what is known of indexes, each over an interval of ticks
    cache.py       the lower end of a link: rules D1 to D8
    directory.py   the upper end of a link: rules U1 to U5
    updates.py     an indivisible update as frames on one or on many lanes
    outbox.py      a leaf's batches until its root has them, and what they do to its view
    batches.py     a root's account of the batches it has applied
    arcs.py        where ids come from
    posting.py     user messages: once each, never before what they build on
    services.py    who offers what, and who is gone
    quotas.py      how much is too much

The search in `echostore.testing.coherence_search` runs these very machines through every order of events.
"""
