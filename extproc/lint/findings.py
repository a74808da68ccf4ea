"""Differences of many requests → findings with costs.

Differences are gathered by site: the family of requests, the part of the prompt, and the text that follows.
A site becomes a finding when what it costs is worth a word, and when its value goes on changing: one that
changes once and stays is a new version of a prompt.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low

from extproc.lint.kinds import Kind
from extproc.lint.text import Place

#: Sites remembered; the least recently seen are dropped first.
_MAX_SITES = 20_000
#: Values and tenants told apart at a site.
_MAX_VALUES = 100_000
_MAX_TENANTS = 1_000
#: What is mended for a whole part of the prompt at once, wherever in it the first difference shows.
_WHOLE_PART = frozenset(
    {Kind.MODEL, Kind.SALT, Kind.TOOLS, Kind.TOOL_ORDER, Kind.KEY_ORDER, Kind.WHITE_SPACE}
)
#: A value has to change this often.
_LEAST_CHANGES = 3
#: It has to cost each request that loses anything this much: 13 ms at 10,000 tokens a second.
_LEAST_LOSS_TOKENS = 128
#: Sites of one family, part and kind this close together are one.
_NEAR_TOKENS = 64
#: Text that follows a changing passage is the template's if at least this share of its requests have it.
_TEMPLATE_SHARE = 0.3
#: A tenant with no more of the losing requests than this met the template by chance.
_CHANCE_SHARE = 0.02
#: Values of one place differ in length by no more than this.
_SAME_PLACE_BYTES = 16
#: An id that comes back this often belongs to a session, not to a request.
_SESSION_REUSE = 1.5


@dataclass(slots=True)
class Family:
    """Requests of one template.

    ``is_loose``: its first request shared something with another family. ``least_share``: the least that a
    request shared with it when it came. ``tokens``: of all their prompts. ``sites``: by the text behind them.
    """

    number: int
    is_loose: bool = False
    least_share: float = 1.0
    requests: int = 0
    tokens: float = 0.0
    sites: dict[int, list[_Site]] = field(default_factory=dict)


@dataclass(slots=True)
class Loss:
    """What one request lost at one difference.

    ``tokens``: the equal text behind it, up to the next difference. ``behind_tokens``: all equal text behind
    it, also behind further ones. ``landing``: identity of the text that follows, 0 in history;
    ``landing_at``: the byte where it starts. ``having``: requests so far that have that text, or what has
    moved. ``value``: identity of what stands there.
    """

    kinds: tuple[Kind, ...]
    in_history: bool
    place: Place
    tokens: int
    behind_tokens: int
    landing: int
    landing_at: int
    having: int
    value: int
    where: str
    other: str
    tenant: str
    prompt_tokens: float
    example: tuple[str, str] | None = None


@dataclass(slots=True)
class _Site:
    family: Family
    landing: int
    in_history: bool
    kinds: Counter[Kind] = field(default_factory=Counter)
    also: Counter[Kind] = field(default_factory=Counter)
    places: list[Place] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    behind_tokens: int = 0
    landing_at: int = 0
    having: int = 0
    passing: int = 1  # the one that the first loss was compared with
    values: set[int] = field(default_factory=set)
    changes: int = 0
    last_value: int = 0
    tenants: Counter[str] = field(default_factory=Counter)
    prompt_tokens: float = 0.0
    where: tuple[str, str] = ("", "")
    example: tuple[str, str] | None = None

    def add(self, loss: Loss) -> None:
        self.kinds[loss.kinds[0]] += loss.behind_tokens
        for kind in loss.kinds[1:]:
            self.also[kind] += loss.behind_tokens
        if len(self.places) < 101:
            self.places.append(loss.place)
        self.changes += bool(self.requests) and loss.value != self.last_value
        self.last_value = loss.value
        self.requests += 1
        self.tokens += loss.tokens
        self.behind_tokens += loss.behind_tokens
        self.landing_at, self.having = loss.landing_at, loss.having
        if len(self.values) < _MAX_VALUES:
            self.values.add(loss.value)
        if loss.tenant and (loss.tenant in self.tenants or len(self.tenants) < _MAX_TENANTS):
            self.tenants[loss.tenant] += 1
        self.prompt_tokens += loss.prompt_tokens
        if self.requests <= 2:  # the second is less likely than the first to be a chance meeting
            self.where, self.example = (loss.other, loss.where), loss.example

    def join(self, other: _Site) -> None:
        self.kinds += other.kinds
        self.also += other.also
        self.places += other.places
        self.requests += other.requests
        self.tokens += other.tokens
        self.behind_tokens += other.behind_tokens
        self.passing += other.passing
        self.changes += other.changes + len(other.values - self.values)
        self.values |= other.values
        self.tenants += other.tenants
        self.prompt_tokens += other.prompt_tokens
        self.in_history &= other.in_history
        if not other.landing:
            self.landing = 0

    @property
    def is_chance(self) -> bool:
        """Passages that moved, or before text, that is no part of the template, as the whole log shows."""
        if self.in_history or self.kind not in (Kind.BLOCK, Kind.TOOLS, Kind.ORDER, Kind.TOOL_ORDER):
            return False
        return self.having < _TEMPLATE_SHARE * self.family.requests

    @property
    def kind(self) -> Kind:
        return self.kinds.most_common(1)[0][0]

    @property
    def place(self) -> Place:
        """The median one."""
        middle = median_low([p.token for p in self.places])
        return next(p for p in self.places if p.token == middle)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    Attributes:
        kind: what it is; ``also``: what else stands right beside it.
        hint: a note rather than a fault; it doesn't fail a check.
        family: identity of the template, the same in every run over the same prompts.
        place: where it stands (the median one).
        in_history: it shows between turns of a conversation only.
        requests: how many have this part of the template; ``losing``: how many of them lost something here.
        values: different values among those that lost.
        tokens: lost to this fault alone, that is up to the next one; findings add up.
        behind_tokens: equal text behind it in all; what mending it and those further on would save.
        share: ``behind_tokens`` of the prompt tokens of ``requests``.
        where: two lines of the log that show it.
        tenants: digests of those with more than 2 % of the losing requests.
        example: text around it in the two, if asked for.

    """

    kind: Kind
    also: tuple[Kind, ...]
    hint: bool
    family: str
    place: Place
    in_history: bool
    requests: int
    losing: int
    values: int
    tokens: int
    behind_tokens: int
    share: float
    where: tuple[str, str]
    tenants: tuple[str, ...]
    example: tuple[str, str] | None


class Findings:
    """Collects losses; memory is bounded."""

    def __init__(self) -> None:
        self._sites: OrderedDict[tuple[int, int, str, int], _Site] = OrderedDict()
        self.dropped = 0

    def passed(self, family: Family, landings: Iterable[tuple[int, int]]) -> None:
        """A request of a family, whether it loses anything or not: (identity, byte) of each of its chunks."""
        sites = family.sites
        for landing, at in landings:
            for site in sites.get(landing, ()):
                site.passing += abs(at - site.landing_at) <= _SAME_PLACE_BYTES

    def add(self, family: Family, losses: Iterable[Loss]) -> None:
        """One request's losses; several at one site count as one."""
        here: dict[tuple[int, int, str, int], Loss] = {}
        for loss in losses:
            kind, place = loss.kinds[0], loss.place
            if loss.in_history:
                key = (family.number, -2, kind.value, 0)
            elif kind in _WHOLE_PART:
                key = (family.number, place.message, f"{place.part} {kind}", 0)
            else:
                sort = "passage" if kind in (Kind.ORDER, Kind.BLOCK) else "value"
                key = (family.number, place.message, f"{place.part} {sort}", loss.landing)
            if key in here:
                here[key].tokens += loss.tokens
            else:
                here[key] = loss
        for key, loss in here.items():
            self._site(family, key, loss.in_history).add(loss)

    def _site(self, family: Family, key: tuple[int, int, str, int], in_history: bool) -> _Site:
        site = self._sites.get(key)
        if site is not None:
            self._sites.move_to_end(key)
            return site
        landing = key[-1]
        site = self._sites[key] = _Site(family, landing, in_history)
        if landing:
            family.sites.setdefault(landing, []).append(site)
            site.passing += 1
        if len(self._sites) > _MAX_SITES:
            self._drop(self._sites.popitem(last=False)[1])
        return site

    def _drop(self, site: _Site) -> None:
        self.dropped += 1
        if site.landing:
            here = site.family.sites[site.landing]
            here.remove(site)
            if not here:
                del site.family.sites[site.landing]

    def report(self, *, min_tokens: int, min_share: float) -> list[Finding]:
        """Those worth a word, the dearest first.

        ``min_tokens``, ``min_share``: of `Finding.behind_tokens` and `Finding.share`, at least.
        """
        sites = [site for site in self._sites.values() if not site.is_chance]
        merged = [s for s in _merged(sites) if s.behind_tokens >= _LEAST_LOSS_TOKENS * s.requests]
        found = [_finding(site) for site in merged if site.changes >= _LEAST_CHANGES]
        found = [f for f in found if f.behind_tokens >= min_tokens and f.share >= min_share]
        return sorted(found, key=lambda f: (f.hint, -f.tokens, -f.behind_tokens, f.family))


def _merged(sites: Iterable[_Site]) -> list[_Site]:
    """Sites that differ only in the text that follows, as one."""
    merged: list[_Site] = []
    for site in sorted(sites, key=lambda s: s.requests, reverse=True):
        for other in merged:
            if (
                other.family is site.family
                and other.kind == site.kind
                and (other.place.message, other.place.part) == (site.place.message, site.place.part)
                and (site.kind is Kind.ORDER or abs(other.place.token - site.place.token) <= _NEAR_TOKENS)
            ):
                other.join(site)
                break
        else:
            merged.append(site)
    return merged


def _finding(site: _Site) -> Finding:
    kind = site.kind
    requests = site.family.requests
    tokens = site.family.tokens
    if site.landing:
        # Those that have the text behind it; a family may hold more than one template.
        requests = max(min(requests, max(site.passing, site.requests + 1)), site.requests)
        tokens = site.prompt_tokens / site.requests * requests
    reuse = requests / max(1, len(site.values))
    if kind is Kind.ID:
        kind = Kind.SESSION_ID if reuse >= _SESSION_REUSE else Kind.REQUEST_ID
    also = [k for k, n in (site.kinds + site.also).most_common() if n >= 0.2 * site.behind_tokens]
    return Finding(
        kind=kind,
        also=tuple(k for k in also if k not in (site.kind, kind)),
        # Salts that several requests share keep tenants apart on purpose.
        hint=kind is Kind.MODEL or (kind is Kind.SALT and reuse >= 2),
        family=f"{site.family.number:08x}"[-8:],
        place=site.place,
        in_history=site.in_history,
        requests=requests,
        losing=site.requests,
        values=len(site.values),
        tokens=site.tokens,
        behind_tokens=site.behind_tokens,
        share=min(1.0, site.behind_tokens / tokens) if tokens else 0.0,
        where=site.where,
        tenants=tuple(sorted(t for t, n in site.tenants.items() if n > _CHANCE_SHARE * site.requests)),
        example=site.example,
    )
