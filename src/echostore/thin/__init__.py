"""The leaf of the coherence protocol for programs: read and write a party through a peer, without holding it.

    import echostore
    with echostore.connect("ws://127.0.0.1:8080/thin", capability) as party:
        task = party.create(type="task", title="Tickets", done=False)
        task["done"] = True
        print(party.query(type="task").where(done=True).all())

    thin_party.py    what an application touches: ThinParty
    queries.py       queries, their answers, watches
    items.py         handles of items
    overlay.py       own batches on top of what the root said
    operations.py    the operations a leaf writes
    answers.py       what is shown of an index, made once and kept
    driver.py        the kernel's Leaf machine with a thread, timers and connections
    waiting.py       what callers wait for
    teller.py        the thread that runs an application's functions
    link.py          one WebSocket connection
    leaf_store.py    what survives a restart: name, ids, outbox
    hashes.py        whether a value is what the root's state says
    aio.py           the same for asyncio
    browser/         the leaf as one ES module, and a planner page

It imports the wire and the kernel alone: a thin client brings no store, no mesh and no engine.
"""
