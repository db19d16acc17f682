"""What other programs of this machine may do with the objects of a running peer. All that is not listed is refused.

    OFFERED   names that may be read or called, by class
    SETTABLE  names that may be set
    contexts  may be entered where a call gave one out, such as a batch; the objects themselves may not: the end of a `with`
              over the peer would close it under everybody else

A new method of one of these classes is offered once its name is here. Left out on purpose: what ends the service or hangs it
(`close` of the peer, locks, `reading`, `writing`), what tests replace (`now_ms`), and the parts that a peer is made of (keys,
stores, runtimes, sync ports).
"""

from inspect import getattr_static
from typing import Any, Final

from echostore.kernel.errors import Refused
from echostore.peer.local_values import living_name


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ITEM: Final = _names(
    """
    __repr__ access children dangling delete deleted diff embed_in embedded failed foreign_keys history id link links
    locator metadata model move name parent party reference restore restrict set_foreign_key source stream target type
    unembed_from unrestrict upgrade value version
    """
)
_QUERY: Final = _names(
    """
    __iter__ __repr__ all children count deleted doubts embedded explain first groups ids limit links one order_by parent
    parties reduce references referrers rows select source spec subscribe target to_arrow value watch where
    """
)

OFFERED: Final[dict[str, frozenset[str]]] = {
    "ArrayItem": _ITEM
    | _names(
        """
        __delitem__ __getitem__ __iter__ __len__ __setitem__ append insert move_element remove to_list
        """
    ),
    "Capabilities": _names("issue issued revoke revoked why_not"),
    "CustomItem": _ITEM | _names("apply instance opaque"),
    "Epochs": _names(
        """
        accepted agreement all chain create create_from disputes fetch gc get hear_of judged left_out names
        own_chain plan policy previous_snapshot reach record review rivals sizes tally verify zero
        """
    ),
    "Files": _names("add chunks fetch missing read save"),
    "Invitation": _names("cancel id passcode state ticket wait"),
    "Inviting": _names("all cancel invite invite_device issued join join_device wait"),
    "Item": _ITEM,
    "LogItem": _ITEM | _names("__iter__ __len__ append post posts set_retention threads"),
    "Members": _names(
        """
        __iter__ __len__ admit admit_group adopt all change_role check_may_admit check_may_say find_key groups
        issue_claim new_group rejected remove retire_feed revoke_device set_policy set_profile unseen_children why
        """
    ),
    "MetaStore": _names("contacts feeds parties party setting settings"),
    "MultiQuery": _QUERY,
    "Network": _names(
        """
        addresses alive connect connected connected_members connections disconnect discover flow intake inviting
        keep_connecting listen progress quota_of_device quota_of_feed seen set_flow set_quotas shared_parties
        """
    ),
    "Party": _names(
        """
        __repr__ _create acknowledged admitted anchor arrived as_of batch capabilities capability child_parties close create
        create_view elsewhere files find_view flush get handle handles has has_schemas index invite is_deleted items key
        known_length link members open_snapshot pause peer publish_model published_models query redo reference_to
        refresh rejected revive roots schemas shared_length snapshot status stream system_item timeframe title
        undo views wait_admitted wait_arrived wait_for
        """
    ),
    "Peer": _names(
        """
        __repr__ close_party closed connect contacts create_child create_party default_party device enter enter_child epochs
        flush forget_identity_key forget_party held held_parties home identity import_party invite_device join
        join_device listen meta name network new_view_key on_network open_parties opened parties party pause_party
        query read_only recover recovery_phrase rename request_join resolve resume_party revoke_device serve_thin
        thin_services use_party view_classes
        """
    ),
    "PropertySetItem": _ITEM
    | _names(
        """
        __contains__ __delitem__ __getitem__ __iter__ __setitem__ add conflicts get increment keys remove to_dict
        update
        """
    ),
    "Query": _QUERY,
    "Receipt": _names("__repr__ anchor durable feed held_by length party processed wait"),
    "Schemas": _names("all check_change check_new declare_indexes define extend get violations"),
    "Snapshot": _names(
        """
        __repr__ blob cid item_count load load_item load_view new_blobs new_bytes root root_bytes timeframe
        unplaced unsaved
        """
    ),
    "Stream": _names("__iter__ __next__ anchor blocks_read compacted reached wait"),
    "Subscription": _names("__call__ close"),
    "TextItem": _ITEM | _names("__len__ __str__ append cursor cursor_position insert mark runs splice unmark"),
    "ThinService": _names("indexes links numbers trace url"),
    "ViewClasses": _names("all known register"),
    "Watch": _names("__iter__ __next__ close closed poll timeout_s"),
}

_NOTHING: Final = object()

SETTABLE: Final = frozenset({("Party", "title")}) | {
    (item, "name") for item in ("Item", "ArrayItem", "CustomItem", "LogItem", "PropertySetItem", "TextItem")
}


def check_offered(target: Any, name: Any) -> None:
    """Refuse a name that other programs may not read or call."""
    kind = _kind(target)
    if isinstance(name, str) and name in OFFERED.get(kind, ()):
        return
    if not isinstance(name, str) or name.startswith("_") or getattr_static(target, name, _NOTHING) is _NOTHING:
        raise AttributeError(f"{kind} has no {name!r:.60}")
    raise Refused(
        f"{name} of a {kind} is for the program that runs the peer",
        next_step="Stop `echostore serve` and open the home in this program.",
    )


def check_settable(target: Any, name: Any) -> None:
    """Refuse to set what other programs may not set."""
    kind = _kind(target)
    if (kind, name) not in SETTABLE:
        raise Refused(f"{name!r:.60} of a {kind} is set by the program that runs the peer")


def _kind(target: Any) -> str:
    """The class under which the other side knows an object; of what is no living object, its own."""
    name = living_name(type(target))
    return type(target).__name__ if name is None else name.partition(":")[2]
