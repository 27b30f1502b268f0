"""Text of foreign origin, as it may be shown: without control characters, secrets hidden, with aliases where wanted.

Names of processes, drives and hosts, messages, output, tracebacks, command lines and values of variables are chosen by
others, and reports go from hand to hand. A secret is known by where it stands (a password in an address, what follows
the name "token"), or by its value, where the environment has it under a name that promises one. Numbers, paths and
words like "none" stay as they are: our own figures and serial numbers are no secrets, whatever stands before them."""

import hmac
import os
import re
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

# Colour codes first, as whole sequences; then every control character that is no white space, those that turn the
# direction of writing, by which a line reads otherwise than it is, and halves of surrogate pairs, which are no UTF-8.
_UNPRINTABLE = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]|[\ud800-\udfff]"
)
# What pytest itself writes beside text: colours (its own, and never what hides), and how far it is (pytest 9).
_PYTESTS_OWN = re.compile(r"((?:\x1b\[(?!(?:[\d;]*;)?0*8[;m])[\d;]*m|\x1b\]9;4;[\d;]*\x1b\\|\r)+)")


def clean(text: str) -> str:
    """`text` without what could upset a terminal or a file: broken machines write anything."""
    return _UNPRINTABLE.sub("", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """The same in one line: what others wrote cannot add lines that look like ours."""
    return " ".join(clean(text).splitlines())


def clean_screen(text: str) -> str:
    """What pytest writes to a terminal, colours and all, without what steers the terminal otherwise."""
    parts = _PYTESTS_OWN.split(text)
    return "".join(part if at % 2 else clean(part) for at, part in enumerate(parts)) if "\x1b" in text else clean(text)


def shortened(text: str, most: int, where: str = "") -> str:
    """Its beginning and its end, of a long one: the cause of a failure is in one of the two. `where`: the rest is."""
    left_out = f"... {len(text) - most:,} characters left out{where} ..."
    return f"{text[: most // 2]}\n{left_out}\n{text[-most // 2 :]}" if len(text) > most else text


HIDDEN = "(hidden)"

# Names of variables that promise a secret. Rather one value too many is hidden than one too few, so most count anywhere
# in a name: APIKEY, PASSPHRASE, AUTHORIZATION. PATH, SIGNAL and AUTHOR are no secrets.
_VARIABLE = (
    "KEY|TOKEN|SECRET|WEBHOOK|PASS(?!ED|ES|ING)|PWD|AUTH(?!ORS?(?![A-Z]))|CRED|COOKIE|BEARER|JWT|LOGIN"
    r"|(?<![A-Z])(?:PAT|SIG)(?![A-Z])"
)
NAMES = re.compile(_VARIABLE, re.IGNORECASE)

# A name inside a text, which holds other words too: "token", "api_token" and "apiToken", not "tokenizer" or "key".
_NAME = (
    r"(?:(?:(?<![A-Za-z0-9])|(?<=[a-z])(?=[A-Z]))(?i:(?:o?auth|access|api|bearer|client|refresh|session)?[_-]?"
    r"(?:token|secret|passw(?:or)?d|passphrase|pwd|credentials?|jwt|sig|signature|login"
    r"|(?:api|access|account|auth|encryption|private|secret|shared)[_-]?key))"
    rf"|(?<![A-Za-z0-9_])(?=[A-Z0-9_]{{0,64}}?(?:{_VARIABLE}))[A-Z][A-Z0-9_]{{0,128}})(?![A-Za-z0-9_-])"
)
# Between a name and its value: the end of a quotation or of an index, and what assigns.
_THEN = r"(?:\\?[\"'])?\]?[ \t]*(?:={1,2}|:)[ \t]*"
_BARE = r"[^\s\"'`&;,()\[\]{}<>]+"
_NO_WORD = rf"(?=\S*\d)(?=\S*[A-Za-z])(?=\S{{8}}){_BARE}"


# Not compiled before the first line that is looked at: that takes longer than importing all else here. A line can be
# long: no part that many places of it could begin with goes on without a bound.
_PATTERNS = (
    # Before the host of an address: what stands behind a colon may hold every character, "/" and "@" too.
    r"(?<=://)(?P<secret>[^\s/?#@:]{0,256}:\S{0,256}|[^\s/?#@]{1,256})(?=@)",
    # What is asked of an address.
    r"://[^\s\"'<>?]{0,1024}\?(?P<secret>[^\s\"'<>=]{0,1024}=[^\s\"'<>]*)",
    # user:password@host
    r"(?<![\w@:/.+-])(?P<secret>[\w.+-]+:[^\s@/:\"']+)(?=@\w)",
    # Headers of requests.
    rf"(?i:\b(?:authorization|cookie){_THEN}\\?[\"']?)(?P<secret>[^\"'\\]+)",
    r"(?i:\bbearer) +(?P<secret>(?=\S*\d)[\w.~+/=-]{8,})",
    # Tokens that their makers have marked: GitHub, GitLab, Hugging Face, NVIDIA, Slack, Amazon, JSON Web Tokens.
    r"\b(?P<secret>(?:gh[opsur]_|github_pat_|glpat-|hf_|nvapi-|xox[abeprs]-|AKIA)[\w-]{10,}"
    r"|eyJ[\w-]{1,4096}\.[\w-]+\.[\w-]*)",
    # The same of Google, Stripe, Docker, GitLab, Slack, Anthropic, OpenAI, OpenRouter, Vault, Groq and Tailscale; of
    # Amazon, OpenAI, PyPI and npm: words begin like these, and have no digit, or a hyphen soon.
    r"(?<![\w-])(?P<secret>(?:AIza|ya29\.|[sr]k_live_|dckr_[op]at_|glrt-|xapp-|sk-(?:ant|proj|svcacct|admin|or-v1)-"
    r"|hvs\.|gsk_|tskey-auth-)(?=[\w-]*\d)[\w-]{10,}"
    r"|(?:ASIA(?=[A-Z0-9]{12})|(?:sk|pypi)-(?=\w{12})|npm_(?=[A-Za-z0-9]{12}))(?=\w*\d)[\w-]+)",
    # "token": "X", token = 'X'
    rf"{_NAME}{_THEN}(?P<quote>\\?[\"'])(?P<secret>(?:(?!(?P=quote)).)+)",
    # token=X; and, if X looks like no word: token: X, token = X, --token X
    rf"{_NAME}=(?P<secret>{_BARE})",
    rf"{_NAME}(?:: ?| = )(?P<secret>{_NO_WORD})",
    rf"(?<![\w-])--[\w-]*?{_NAME}[\"']?,? +[\"']?(?P<secret>{_NO_WORD})",
    # What these are given first by an option, in a line of a shell or a list of arguments: no variable, no user alone.
    r"\b(?:ipmitool\b[^\n|;&]{0,512}?[\s\"']-P|sshpass[\s\"',]+-p|mysql\w{0,9}\b[^\n|;&]{0,512}?[\s\"']-p"
    r"|(?:docker|podman)[\s\"',]+login\b[^\n|;&]{0,512}?[\s\"']-p"
    r"|curl\b[^\n|;&]{0,512}?[\s\"'](?:-u|--user)(?=[\"', =]+[^\s\"':]+:))"
    r"(?:[\"'],)?[ =]*[\"']?(?P<sure>[^\s\"'=,;|&)\]$<{%*(-][^\s\"']*)",
)
# Without one of these in it a line is not looked at any closer: output can be long.
_MARKS = (
    "://", "@", "auth", "cookie", "bearer", "token", "secret", "pass", "pwd", "key", "cred", "jwt", "sig", "pat",
    "login", "ghp_", "gho_", "ghs_", "ghu_", "ghr_", "github_", "glpat-", "hf_", "nvapi-", "xox", "akia", "eyj", "aiza",
    "ya29.", "k_live_", "dckr_", "glrt-", "xapp-", "asia", "sk-", "hvs.", "gsk_", "pypi-", "npm_", "ipmitool", "mysql",
    "curl",
)  # fmt: skip
_HARMLESS = re.compile(
    r"[\d.,:+-]*|0x[\da-f]+|[~/.].*|true|false|yes|no|on|off|none|null|default|auto|password|secret|token|\(hidden\)\W*",
    re.IGNORECASE,
)
# A private key (RFC 7468): to its end, or as far as it is there.
_KEY = re.compile(
    r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)"
    r"((?:(?!-----BEGIN|-----END)[\s\S])*(?=-----END)|(?:(?!-----BEGIN|-----END)[^\"'])*)"
)
SHORTEST = 12  # of a value that is looked for everywhere: a shorter one may be a word that means something else there


def redacted(text: str) -> str:
    """`text` as it may be shown: clean, without the secrets in it, and with aliases if these are wanted."""
    text = clean(text)
    for secret in _secrets():
        if secret[:SHORTEST] in text or secret[-SHORTEST:] in text:
            text = _by_value(secret).sub(HIDDEN, text)
    lines = _KEY.sub(lambda key: key[1] + re.sub(r"(?m)^.*\S.*$", HIDDEN, key[2]), text).split("\n")
    for number, line in enumerate(lines):
        lower = line.lower()
        if any(mark in lower for mark in _MARKS):
            for pattern in _PATTERNS:
                lines[number] = re.sub(pattern, _hide, lines[number])
    text = "\n".join(lines)
    return _aliases.text(text) if _aliases else text


def _hide(found: re.Match[str]) -> str:
    if found.lastgroup == "secret" and _HARMLESS.fullmatch(found["secret"]):
        return found[0]
    start, end = (at - found.start() for at in found.span(found.lastgroup or 0))
    return found[0][:start] + HIDDEN + found[0][end:]


def throughout(value: Any, change: Callable[[str], str] = redacted) -> Any:
    """The same value with every text in it changed: JSON, or what pytest shows of a test."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, str) for each in value):  # a secret may go over several lines
            lines = change("\n".join(value)).split("\n")
            if len(lines) == len(value):
                return type(value)(lines)
        return type(value)(throughout(each, change) for each in value)
    if isinstance(value, dict):
        return {throughout(key, change): throughout(each, change) for key, each in value.items()}
    if type(value).__module__.startswith("_pytest."):
        for name, part in vars(value).items():
            setattr(value, name, throughout(part, change))
    return value


def hide_in(report: Any) -> None:
    """Redact pytest's report of a test or a collection: what everybody shows of it, and what it keeps as it was."""
    for name in ("longrepr", "sections", "user_properties", "wasxfail"):
        if value := getattr(report, name, None):
            setattr(report, name, throughout(value))


def variable(name: str, value: str) -> str:
    """The value of a variable, or of an argument that has a name."""
    return HIDDEN if NAMES.search(name) else redacted(value)


def command(arguments: Sequence[str]) -> str:
    """A command line as a shell takes it; values of options that promise a secret and of --metadata are hidden."""
    shown = []
    for two_before, before, argument in zip(("", "", *arguments), ("", *arguments), arguments, strict=False):
        name, assigned, value = argument.partition("=")
        named = two_before == "--metadata" or (before.startswith("--") and "=" not in before)
        if assigned and re.fullmatch(r"[\w.-]+", name):
            text = f"{name}={variable(name, value)}"
        else:
            text = variable(before, argument) if named and not argument.startswith("-") else redacted(argument)
        shown.append(text if HIDDEN in text else shlex.quote(text))
    return " ".join(shown)


def _secrets() -> list[str]:
    """The values of variables with names that promise a secret, and their lines, also in repr; the longest first."""
    values = [value for name, value in os.environ.items() if len(value) >= SHORTEST and NAMES.search(name)]
    lines = [line for value in values for line in (value, *value.splitlines())]
    texts = {text for line in lines for text in (line, repr(line)[1:-1]) if len(text) >= SHORTEST}
    return sorted((text for text in texts if not _HARMLESS.fullmatch(text)), key=len, reverse=True)


@lru_cache(maxsize=256)
def _by_value(secret: str) -> re.Pattern[str]:
    """What finds a secret as a whole word, also where pytest has left out its beginning or its end."""
    head, tail = re.escape(secret[:SHORTEST]), re.escape(secret[-SHORTEST:])
    return re.compile(rf"(?<!\w){re.escape(secret)}(?!\w)|(?<!\w){head}[^\s\"']*?\.\.\.|\.\.\.[^\s\"']*?{tail}(?!\w)")


# Aliases for what identifies a machine and its owner, in evidence that is to be published (--fleet-alias). A thing has
# one alias in all runs with the same key, its hash: peers, resumed runs and fleets still see what is the same. An alias
# is left as it is: the own runs of nodes have put in theirs before.

ALIAS_KEY = "GPUFLEET_ALIAS_KEY"  # the variable; without it who guesses a name can find out that the guess was right
# By their names in JSON: what stands there is replaced whatever it looks like.
IDENTIFYING = {"host", "uuid", "cluster", "guid", "serial", "serials", "board_serial", "chassis_serial"}
NO_CLUSTER = "0" * 32
ALIAS = re.compile(r"\balias-[0-9a-f]{12}\b")
# Too short, or a word that means something else in a text: there it is left, for it identifies nobody either.
_ANY_WORD = re.compile(r"(?i).{0,3}|\D{0,5}|(?:gpu|rank|node|rail|nic|numa|cpu)(?:0|[1-9]\d{0,2})|localhost")

_HEX = "[0-9A-Fa-f]"
_IDENTIFIERS = (
    rf"(?<![\w-])(?:(?:GPU|MIG)-)?{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}(?![\w-])",  # UUID
    rf"(?<![\w-])(?:GPU|MIG)-{_HEX}{{8}}[-.\w]*",  # the same, as pytest shortens it
    rf"(?<![:\w])(?:{_HEX}{{2}}:){{5,19}}{_HEX}{{2}}(?![:\w])",  # MAC, which has 20 bytes over InfiniBand
    rf"(?<=\benx){_HEX}{{12}}\b",  # the same in the name of a network interface
    rf"(?<![:\w])(?:{_HEX}{{4}}:){{3}}{_HEX}{{4}}(?![:\w])",  # GUID
    r"^[\w.-]+(?=:\d+:\d+ \[)|(?<= hostname=\")[^\"]+",  # the host in NCCL's lines, and in junit.xml
    r"(?<=/home/)[^/\s:'\"<>]+|(?<=/Users/)[^/\s:'\"<>]+",
    r"(?P<address>(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\w)"
    rf"|(?<![\w:.])[23fF]{_HEX}{{1,3}}:[0-9A-Fa-f:]{{2,34}}(?![\w:.]))",
)
_IDENTIFIER = re.compile("|".join(_IDENTIFIERS), re.MULTILINE)


class Aliases:
    """`_known`: the names of hosts, users and parts, which have no form by which a text could be searched for them."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._known: dict[str, str] = {}
        self._names = re.compile(r"(?!)")
        self._learn(socket.gethostname())
        if Path.home().name != "root":
            self._learn(Path.home().name)
            self._learn(str(Path.home()))  # whose last name may be a word

    def alias(self, thing: str) -> str:
        if ALIAS.search(thing) or thing in ("", NO_CLUSTER):  # as a single machine has the UUID of its cluster
            return thing
        return f"alias-{hmac.new(self._key, thing.lower().encode(), 'sha256').hexdigest()[:12]}"

    def throughout(self, value: Any) -> Any:
        """JSON with aliases in all that it holds."""
        _walked(value, lambda text, named: self._learn(text) if named else None)
        return _walked(value, lambda text, named: self.alias(text) if named else self.text(text))

    def text(self, text: str) -> str:
        text = self._names.sub(lambda found: self._known[found["name"]], text)
        return _IDENTIFIER.sub(
            lambda found: found[0] if found["address"] and not _tells_a_machine(found) else self.alias(found[0]), text
        )

    def _learn(self, thing: str) -> None:
        new = [name for name in {thing, thing.partition(".")[0]} - self._known.keys() if not _ANY_WORD.fullmatch(name)]
        if new and not ALIAS.search(thing):
            self._known.update(dict.fromkeys(new, self.alias(thing)))
            longest = "|".join(sorted(map(re.escape, self._known), key=len, reverse=True))
            self._names = re.compile(rf"(?<!\w)(?P<name>{longest})(?:\.[A-Za-z][\w-]+)*(?!\w)")


def _walked(value: Any, change: Callable[[str, bool], str | None], named: bool = False) -> Any:
    """JSON with each text as `change` makes it, which hears whether the text stands under an identifying name."""
    if isinstance(value, str):
        return change(value, named)
    if isinstance(value, list | tuple):
        return [_walked(each, change, named) for each in value]
    if isinstance(value, Mapping):
        keys = IDENTIFYING | {"name"} if "kernel" in value else IDENTIFYING  # the facts of a host
        return {key: _walked(each, change, key in keys) for key, each in value.items()}
    return value


def _tells_a_machine(found: re.Match[str]) -> bool:
    """Versions have four numbers too: an address is private, or stands where one does."""
    try:
        address = ip_address(found[0])
    except ValueError:
        return False
    placed = found.string[found.end() :][:1] in (":", "<") or found.string[: found.start()].endswith(("//", "@"))
    nobody = address.is_loopback or address.is_unspecified or address.is_multicast
    return not nobody and (address.version == 6 or address.is_private or placed)


_aliases: Aliases | None = None


def use_aliases(wanted: bool) -> None:
    """From here on evidence and all that is shown of tests has aliases; or has none any more."""
    global _aliases
    _aliases = Aliases(os.environ.get(ALIAS_KEY, "")) if wanted else None


def aliased(value: Any) -> Any:
    """JSON as evidence is to have it."""
    return _aliases.throughout(value) if _aliases else value
