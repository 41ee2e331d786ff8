"""What ranks, keepers and their peers say to each other. Bulk bytes go as descriptors, or as `Bytes` to a peer."""

import msgspec

from argosy.checkpoint.retention import Keep
from argosy.core import ArgosyError


class Overtaken(ArgosyError):
    """The store is slow: a later step is written instead of this one, which stays in memory for a while."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Anything that is said."""


class Hello(Message, frozen=True):
    """A rank wants to save: into this place, with these policies."""

    rank: int
    size: int
    store: str
    keep: list[Keep]


class Lend(Message, frozen=True):
    """A rank asks for an arena; answered by Lent or Refused, when there is one."""

    bytes: int


class Filled(Message, frozen=True):
    """A slot holds a whole snapshot; the descriptor is that of its draft."""

    slot: int
    sequence: int
    name: str
    step: int
    is_tagged: bool
    draft_digest: str


class Torn(Message, frozen=True):
    """A slot (0: none was lent) is given back without a snapshot, and step `name` will not be."""

    slot: int
    name: str
    reason: str


class Apart(Message, frozen=True):
    """A rank writes its part of step `name` from its own memory, so all ranks write theirs; the keeper passes it on."""

    name: str


class Returned(Message, frozen=True):
    """A rank has written a slot's content itself, and is through with it."""

    slot: int


class Look(Message, frozen=True):
    """What do you hold? Answered by Holdings."""


class Take(Message, frozen=True):
    """Hand me this version to read; answered by a Kept for each rank, then Holdings."""

    name: str


class Bye(Message, frozen=True):
    """A saver was closed; when all were, the directory is let go."""


class Offer(Message, frozen=True):
    """A keeper ships one rank's part of a version to its peer: the draft's bytes, then the arena's, follow."""

    name: str
    step: int
    rank: int
    size: int
    bytes: int
    draft_bytes: int
    draft_digest: str


class Bytes(Message, frozen=True):
    """The next bytes of what was offered."""

    data: bytes


FromClient = Hello | Lend | Filled | Torn | Apart | Returned | Look | Take | Bye | Offer | Bytes


class Welcome(Message, frozen=True):
    """The keeper holds the directory for this run."""

    pid: int


class Lent(Message, frozen=True):
    """A slot; its descriptor comes with it when the rank has not seen it yet."""

    slot: int


class Refused(Message, frozen=True):
    """Not possible; `in_use` if another run holds the directory."""

    reason: str
    hint: str = ""
    in_use: bool = False


class Durable(Message, frozen=True):
    """A step is committed."""

    name: str


class Failed(Message, frozen=True):
    """A step will not be committed."""

    name: str
    reason: str
    overtaken: bool = False


class Said(Message, frozen=True):
    """A line for the user."""

    text: str


class Version(msgspec.Struct, frozen=True):
    """A snapshot of all ranks."""

    name: str
    step: int
    size: int


class Holdings(Message, frozen=True):
    """The whole versions that are held, newest first."""

    versions: list[Version]


class Kept(Message, frozen=True):
    """One rank's part of a version: descriptors of its arena and its draft."""

    name: str
    rank: int
    draft_digest: str


class Received(Message, frozen=True):
    """What was offered has arrived and matches its digests, or why not."""

    name: str
    rank: int
    fault: str = ""


FromKeeper = Welcome | Lent | Refused | Apart | Durable | Failed | Said | Holdings | Kept | Received

client_decoder: "msgspec.msgpack.Decoder[FromClient]" = msgspec.msgpack.Decoder(FromClient)
keeper_decoder: "msgspec.msgpack.Decoder[FromKeeper]" = msgspec.msgpack.Decoder(FromKeeper)
