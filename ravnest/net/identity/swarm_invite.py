"""Invite to a swarm: `ravnest://HOST:PORT/#TOKEN.FINGERPRINT`, one line for the user of a provider."""

from dataclasses import dataclass, field
from typing import Final, Self

from ravnest.errors import PeerError
from ravnest.net.address import join_address, split_address
from ravnest.net.identity.invite_key import InviteToken, decode_url_safe, encode_url_safe

FINGERPRINT_BYTES: Final = 32
MAX_LINE_CHARACTERS: Final = 1024


@dataclass(frozen=True, slots=True)
class SwarmInvite:
    """The address of the coordinator, the token that it accepts, and the SHA-256 of the swarm's authority.

    `line` is the whole invite and secret; `str` and `repr` omit the token, so they may be logged.
    """

    host: str
    port: int
    token: InviteToken = field(repr=False)
    fingerprint: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an invite as `line` writes it. PeerError names the mistake, and never shows the token."""
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
        """`host:port`, as other modules of the transport expect it."""
        return join_address(self.host, self.port)

    @property
    def line(self) -> str:
        """The whole invite, for a provider. Secret."""
        return f"ravnest://{self.address}/#{self.token.encode()}.{encode_url_safe(self.fingerprint)}"

    def __str__(self) -> str:
        return f"the invite {self.token.id} to {self.address}"


def _malformed(place: str, why: str) -> PeerError:
    # The text after the address may contain the token, even in a wrong place, so no message shows it.
    named = f"the invite to {place}" if place else "the invite"
    return PeerError(f"{named} is malformed: {why}; copy the whole line, ravnest://HOST:PORT/#TOKEN.FINGERPRINT")
