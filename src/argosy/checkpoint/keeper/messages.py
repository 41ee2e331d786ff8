"""What ranks and keepers say to each other. Bulk bytes go as descriptors."""

import msgspec

from argosy.checkpoint.retention import Keep
from argosy.core import ArgosyError


class Overtaken(ArgosyError):
    """The store is slow: a later step is written instead of this one, which stays in memory for a while."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Any message between a rank and a keeper."""


class Hello(Message, frozen=True):
    """A rank wants to save: into this place, with these policies."""

    rank: int
    size: int
    store: str
    keep: list[Keep]


class Lend(Message, frozen=True):
    """A rank asks for an arena; answered by Lent, when there is one. A keeper without memory for it ends."""

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


class Look(Message, frozen=True):
    """What do you hold? Answered by Holdings."""


class Take(Message, frozen=True):
    """Hand me this version to read; answered by a Kept for each rank, then Holdings."""

    name: str


class Bye(Message, frozen=True):
    """A saver was closed; when all were, the directory is let go."""


FromClient = Hello | Lend | Filled | Torn | Look | Take | Bye


class Welcome(Message, frozen=True):
    """The keeper holds the directory for this run."""


class Lent(Message, frozen=True):
    """A slot; its descriptor comes with it when the rank has not seen it yet."""

    slot: int


class Refused(Message, frozen=True):
    """The keeper does not serve this rank; `in_use` if another run holds the directory."""

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


FromKeeper = Welcome | Lent | Refused | Durable | Failed | Said | Holdings | Kept

client_decoder: "msgspec.msgpack.Decoder[FromClient]" = msgspec.msgpack.Decoder(FromClient)
keeper_decoder: "msgspec.msgpack.Decoder[FromKeeper]" = msgspec.msgpack.Decoder(FromKeeper)
