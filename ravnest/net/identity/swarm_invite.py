"""The invite of a swarm with its own authority: `ravnest://HOST:PORT/#TOKEN.FINGERPRINT`, one line to hand over."""

from dataclasses import dataclass, field
from typing import Final, Self

from ravnest.errors import PeerError
from ravnest.net.address import join_address, split_address
from ravnest.net.identity.invite_key import InviteToken, decode_url_safe, encode_url_safe

FINGERPRINT_BYTES: Final = 32
MAX_LINE_CHARACTERS: Final = 1024


@dataclass(frozen=True, slots=True)
class SwarmInvite:
    """Where the coordinator listens, the token it admits with, and the SHA-256 of the swarm's authority.

    `line` is the whole invite and secret; `str` and `repr` leave the token out, so that they may be logged.
    """

    host: str
    port: int
    token: InviteToken = field(repr=False)
    fingerprint: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an invite as `line` writes it. PeerError names what is wrong, and never shows the token."""
        line = text.strip()
        if len(line) > MAX_LINE_CHARACTERS:
            raise _malformed("", "it is far too long")
        scheme, separator, rest = line.partition("://")
        if not separator or scheme.lower() != "ravnest":
            raise _malformed("", "it does not begin with ravnest://")
        before, _, fragment = rest.partition("#")
        place, _, path = before.partition("/")
        if not fragment:
            raise _malformed("", "the part after # is missing; quote the line if your shell cut it there")
        try:
            host, port = split_address(place)
        except PeerError as error:
            raise _malformed("", str(error)) from None
        if path:
            raise _malformed(place, "something stands between the address and #")
        token, separator, fingerprint = fragment.partition(".")
        if not separator:
            raise _malformed(place, "the fingerprint after the token is missing")
        try:
            return cls(host, port, InviteToken.decode(token), decode_url_safe(fingerprint, FINGERPRINT_BYTES))
        except ValueError:
            raise _malformed(place, "the part after # is cut short or changed") from None

    @property
    def address(self) -> str:
        """`host:port`, as the rest of the transport takes it."""
        return join_address(self.host, self.port)

    @property
    def line(self) -> str:
        """The whole invite, to hand to a provider. Secret."""
        return f"ravnest://{self.address}/#{self.token.encode()}.{encode_url_safe(self.fingerprint)}"

    def __str__(self) -> str:
        return f"the invite {self.token.id} to {self.address}"


def _malformed(place: str, why: str) -> PeerError:
    # What comes after the address may be the token, wherever a slip of the hand has put it.
    named = f"the invite to {place}" if place else "the invite"
    return PeerError(f"{named} is malformed: {why}; copy the whole line, ravnest://HOST:PORT/#TOKEN.FINGERPRINT")
