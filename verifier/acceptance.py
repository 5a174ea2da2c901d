"""Which drafted tokens the target accepts, and the token it adds itself. Pure: logits and a generator in, verdicts out.

p is the target's law after the transform, q the law the draft was drawn from. For the n drafts x_1..x_n of a request,
logits rows 0..n give p_1..p_{n+1}; the verdict is the accepted prefix of the drafts and one more token.

    greedy     accept while x_k is the argmax; the next token is the argmax.
    seeded     accept while x_k is what (seed, output position) picks from p_k; the next token is what it picks there.
    unseeded   accept x_k with probability min(1, p_k(x_k) / q_k(x_k)); at the first rejection draw from
               max(0, p_k - q_k) renormalised, after n acceptances draw from p_{n+1}. Drafts without q were decided, not
               drawn, and q_k is one-hot; so is a q_k that is not finite. Where the residual has no mass, p_k serves.

p_k is the law of what the request's parameters make of the target's logits (penalties.py, masks.py, min_tokens) with
x_1..x_{k-1} as output. In each case the emitted tokens follow p exactly, whatever the drafts and however many of them were
admitted. All but greedy requests are judged by native_rejection.py where it runs, whoever is in the batch. Knows no drafter, no
KV and no stop rule: what a request keeps of a verdict is decided where it is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.errors import InternalFault
from scheduler.wire import Extension, Verdict
from verifier import native_rejection
from verifier.logprobs import token_logprobs
from verifier.masks import TokenMasks
from verifier.penalties import Judged, changes_logits, penalise
from verifier.sampling import SamplingTable, peak, pick, seeded_pick, transform

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_NO_MASS = 1e-8  # a residual this small is rounding


@dataclass(frozen=True)
class _Batch:
    """Some extensions laid end to end, on the host: E extensions, S logits rows, D drafts.

    num_draft, first_row, first_draft: [E]. owner, depth, positions: [S] the row's extension, its number there (0 is the
    row after the last known token) and its output position. drafts: [D].
    """

    extensions: Sequence[Extension]
    num_draft: Ints
    first_row: Ints
    first_draft: Ints
    owner: Ints
    depth: Ints
    positions: Ints
    drafts: Ints

    @classmethod
    def build(cls, extensions: Sequence[Extension]) -> _Batch:
        num_draft = np.array([e.num_draft for e in extensions], dtype=np.int64)
        first_row = np.cumsum(num_draft + 1) - num_draft - 1
        owner = np.repeat(np.arange(len(extensions)), num_draft + 1)
        depth = np.arange(len(owner)) - first_row[owner]
        output_index = np.array([e.output_index for e in extensions], dtype=np.int64)
        return cls(
            extensions=extensions,
            num_draft=num_draft,
            first_row=first_row,
            first_draft=np.cumsum(num_draft) - num_draft,
            owner=owner,
            depth=depth,
            positions=output_index[owner] + depth,
            drafts=np.concatenate([e.token_ids[len(e.token_ids) - e.num_draft :] for e in extensions], dtype=np.int64),
        )

    def drafts_of(self, index: int) -> Ints:
        return self.drafts[self.first_draft[index] :][: self.num_draft[index]]

    @property
    def draft_rows(self) -> Ints:
        """[D] the row that judges each draft."""
        return np.flatnonzero(self.depth < self.num_draft[self.owner])


def judge(
    *,
    logits: Tensor,
    extensions: Sequence[Extension],
    generator: torch.Generator | None = None,
    masks: TokenMasks | None = None,
) -> list[Verdict]:
    """One verdict per extension, in order. Every extension given here samples.

    logits: [S, V]; num_draft + 1 consecutive rows per extension, the first being the law after its last known token.
    masks: what grammars allow in some of the rows; whoever made them has seen to stop ids and min_tokens there.
    generator: on the device of the logits; independent of the drafter's (noise.fresh_generator). None is torch's own.
    A request whose first row has no law (NaN, +inf or nothing but -inf) gets a verdict with an error, and the others get theirs;
    where a later row has none, the drafts accepted before it stand. Raises ValueError for drafts that cannot be.
    """
    if not extensions:
        return []
    batch = _Batch.build(extensions)
    _refuse_misfits(batch, logits)
    table = SamplingTable.build([e.params for e in extensions], logits.device)
    raw, logits = logits, _as_asked(logits, batch, masks)
    natively = native_rejection.usable(logits)
    by_targets = table.greedy if natively else table.greedy | table.seeded
    if natively and not table.any_greedy:
        num_accepted, tokens, largest = _reject_natively(logits, batch, batch.first_row, table, generator)
        no_targets = np.zeros(len(largest), dtype=np.int64)
        found = np.concatenate((no_targets, np.isfinite(largest), num_accepted, tokens))
        return _with_logprobs(_verdicts(batch, by_targets, found), raw, batch)
    tops, targets = peak(logits)
    answers = [targets, torch.isfinite(tops).to(torch.int64)]
    if table.any_seeded and not natively:
        rows = np.flatnonzero(table.seeded[batch.owner])
        picker, positions = table.take(batch.owner[rows]), torch.from_numpy(batch.positions[rows]).to(logits.device)
        picked = seeded_pick(_select(logits, rows), picker, positions)
        answers[0] = targets.index_copy(0, torch.from_numpy(rows).to(logits.device), picked)
    if not by_targets.all():
        chosen = np.flatnonzero(~by_targets)
        part = _Batch.build([e for e, is_chosen in zip(extensions, ~by_targets, strict=True) if is_chosen])
        if natively:
            first_row = batch.first_row[chosen]
            num_accepted, tokens, _ = _reject_natively(logits, part, first_row, table.take(chosen), generator)
            answers += [torch.from_numpy(num_accepted), torch.from_numpy(tokens)]
        else:
            rows = np.flatnonzero(~by_targets[batch.owner])
            law = transform(_select(logits, rows), table.take(batch.owner[rows]))
            answers += _reject(law, part, generator)
    return _with_logprobs(_verdicts(batch, by_targets, torch.cat(answers).cpu().numpy()), raw, batch)


def _refuse_misfits(batch: _Batch, logits: Tensor) -> None:
    if len(batch.owner) != logits.shape[0]:
        raise ValueError(
            f"logits must hold num_draft + 1 rows per extension: {len(batch.owner)}; got {logits.shape[0]}"
        )
    for extension in batch.extensions:
        if not extension.samples or not 0 <= extension.num_draft < len(extension.token_ids):
            raise ValueError(f"extension of {extension.request_id} must sample and hold a token before its drafts")
    if ((batch.drafts < 0) | (batch.drafts >= logits.shape[1])).any():
        raise ValueError(f"draft token ids must lie in 0..{logits.shape[1] - 1}")


def _as_asked(raw: Tensor, batch: _Batch, masks: TokenMasks | None) -> Tensor:
    """Logits of the laws that the requests asked for: `raw` itself where nobody asked for anything, else a wider copy."""
    changed = [i for i, e in enumerate(batch.extensions) if changes_logits(e.params)]
    rows, ids = _early_stops(batch, raw.shape[1])
    if not changed and not rows and masks is None:
        return raw
    logits = raw.to(torch.promote_types(raw.dtype, torch.float32), copy=True)
    penalise(logits, [_judged(batch, i) for i in changed])
    logits[rows, ids] = -torch.inf
    if masks is not None:
        masks.apply(logits)
    return logits


def _judged(batch: _Batch, index: int) -> Judged:
    extension = batch.extensions[index]
    return Judged(
        params=extension.params,
        first_row=int(batch.first_row[index]),
        drafts=batch.drafts_of(index),
        history_ids=extension.history_ids,
        num_output=extension.output_index,
    )


def _early_stops(batch: _Batch, vocab_size: int) -> tuple[list[int], list[int]]:
    """Rows before min_tokens, and the stop ids that must not be drawn there; grammars bring their own masks."""
    rows: list[int] = []
    ids: list[int] = []
    for i, extension in enumerate(batch.extensions):
        params = extension.params
        if params.grammar is not None:
            continue
        num_early = min(params.min_tokens - extension.output_index, extension.num_draft + 1)
        stops = [s for s in params.stop_ids if 0 <= s < vocab_size] if num_early > 0 else []
        for row in range(batch.first_row[i], batch.first_row[i] + max(0, num_early)):
            rows += [row] * len(stops)
            ids += stops
    return rows, ids


def _select(logits: Tensor, rows: Ints) -> Tensor:
    """These rows (ascending); all of them without a copy."""
    return logits if len(rows) == len(logits) else logits.index_select(0, torch.from_numpy(rows).to(logits.device))


def _reject(law: Tensor, batch: _Batch, generator: torch.Generator | None) -> list[Tensor]:
    """Rejection sampling of unseeded extensions under law [S, V]: accepted drafts and next token, both int64 [E]."""
    device, num_drafts = law.device, len(batch.drafts)
    first_row, first_draft, num_draft = torch.from_numpy(
        np.stack([batch.first_row, batch.first_draft, batch.num_draft])
    ).to(device)
    if num_drafts == 0:
        return [num_draft, pick(law, generator)]
    q_ids, q_probs, q_of_drafts = _proposals(batch, law.shape[1])
    draft_rows = batch.draft_rows
    rows, drafts, owner, depth = torch.from_numpy(
        np.stack([draft_rows, batch.drafts, batch.owner[draft_rows], batch.depth[draft_rows]])
    ).to(device)
    noise = torch.rand(num_drafts, dtype=torch.float64, device=device, generator=generator)
    passed = noise * torch.from_numpy(q_of_drafts).to(device) < law[rows, drafts]
    lanes = torch.zeros(len(batch.extensions), int(batch.num_draft.max()), dtype=torch.int64, device=device)
    num_accepted = lanes.index_put((owner, depth), passed.to(torch.int64)).cumprod(dim=1).sum(dim=1)

    target = law.index_select(0, first_row + num_accepted)
    # The last row of q is empty: it stands for "every draft was accepted", where the residual is the target itself.
    q_rows = torch.where(num_accepted < num_draft, first_draft + num_accepted, num_drafts)
    residual = target.scatter_add(
        1, torch.from_numpy(q_ids).to(device)[q_rows], torch.from_numpy(q_probs).to(device, law.dtype)[q_rows].neg_()
    ).clamp_min_(0)
    agrees = residual.sum(dim=1, keepdim=True) <= _NO_MASS
    return [num_accepted, pick(residual.addcmul_(target, agrees.to(law.dtype)), generator)]


def _reject_natively(
    logits: Tensor,
    batch: _Batch,
    first_row: Ints,
    table: SamplingTable,
    generator: torch.Generator | None,
) -> tuple[Ints, Ints, npt.NDArray[np.float32]]:
    """The same of all sampled extensions, seeded ones too, and the largest logit of each row that was read. logits: of everyone,
    where the extensions of `batch` have theirs from first_row [E] on. table [E]: theirs."""
    q_ids, q_probs, q_of_drafts = _proposals(batch, logits.shape[1])
    return native_rejection.reject(
        logits,
        first_row=first_row,
        num_draft=batch.num_draft,
        first_draft=batch.first_draft,
        drafts=batch.drafts,
        table=table,
        output_index=batch.positions[batch.first_row],
        q_ids=q_ids,
        q_probs=q_probs,
        q_of_drafts=q_of_drafts,
        generator=generator,
    )


def _proposals(batch: _Batch, num_columns: int) -> tuple[Ints, npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """q of every draft and one empty row, ids and probs [D + 1, K] (no id: 0 with mass 0), and q of the drafts, [D]."""
    if not len(batch.drafts):
        return np.zeros((1, 1), dtype=np.int64), np.zeros((1, 1), dtype=np.float32), np.zeros(0)
    width = max([1, *(e.q_ids.shape[1] for e in batch.extensions if e.q_ids is not None)])
    q_ids = np.full((len(batch.drafts) + 1, width), -1, dtype=np.int64)
    q_probs = np.zeros(q_ids.shape, dtype=np.float32)
    for extension, first in zip(batch.extensions, batch.first_draft, strict=True):
        here = slice(first, first + extension.num_draft)
        if extension.q_ids is None or extension.q_probs is None or extension.params.seed is not None:
            q_ids[here, 0], q_probs[here, 0] = batch.drafts[here], 1
            continue
        if extension.q_ids.shape != extension.q_probs.shape or len(extension.q_ids) != extension.num_draft:
            raise ValueError(f"q_ids and q_probs of {extension.request_id} must both be [num_draft, K]")
        q_ids[here, : extension.q_ids.shape[1]] = extension.q_ids
        q_probs[here, : extension.q_ids.shape[1]] = extension.q_probs
    beyond = np.flatnonzero((q_ids >= num_columns).any(axis=1))
    if len(beyond):
        raise ValueError(f"q_ids of {_owner_of(batch, beyond[0])} must lie in 0..{num_columns - 1}, or be -1")
    q_probs[q_ids < 0] = 0
    broken = np.flatnonzero(~np.isfinite(q_probs).all(axis=1))  # a fault of the drafter costs acceptance, nothing else
    q_ids[broken], q_probs[broken] = -1, 0
    q_ids[broken, 0], q_probs[broken, 0] = batch.drafts[broken], 1
    of_drafts = np.where(q_ids[:-1] == batch.drafts[:, None], q_probs[:-1], 0).sum(axis=1, dtype=np.float64)
    wrong = np.flatnonzero((of_drafts <= 0) | (q_probs[:-1] < 0).any(axis=1))
    if len(wrong):
        raise ValueError(
            f"q_probs of {_owner_of(batch, wrong[0])} must give its drafted tokens mass and be nowhere negative"
        )
    return q_ids.clip(min=0), q_probs, of_drafts


def _owner_of(batch: _Batch, draft: np.intp) -> str:
    return batch.extensions[int(np.searchsorted(batch.first_draft, draft, side="right")) - 1].request_id


def _verdicts(batch: _Batch, by_targets: Flags, answers: Ints) -> list[Verdict]:
    """by_targets [E]: whose drafts are compared with the targets. answers: targets [S], is each row finite [S], then
    num_accepted [R] and next token [R] of the others."""
    targets, finite, judged = np.split(answers, [len(batch.owner), 2 * len(batch.owner)])
    rejections = iter(judged.reshape(2, -1).T.tolist())
    verdicts = []
    for i, extension in enumerate(batch.extensions):
        drafts = batch.drafts_of(i).tolist()
        if by_targets[i]:
            wanted = targets[batch.first_row[i] :][: extension.num_draft + 1].tolist()
            num_accepted = next((k for k, draft in enumerate(drafts) if draft != wanted[k]), len(drafts))
            token = wanted[num_accepted]
        else:
            num_accepted, token = next(rejections)
        judges = finite[batch.first_row[i] :][: num_accepted + 1]
        if not judges[0]:
            verdicts.append(_lawless(extension))
            continue
        if not judges.all():
            # what was accepted before the row without a law stands, as it would without drafts; the next step ends there
            num_accepted = int(judges.argmin()) - 1
            token = drafts[num_accepted]
        verdicts.append(Verdict(extension.request_id, num_accepted, (*drafts[:num_accepted], token)))
    return verdicts


def not_finite(output_index: int) -> InternalFault:
    """Only this request ends: what makes the target's numbers overflow is in its own tokens."""
    return InternalFault(f"the target's logits are not finite at output position {output_index}")


def _lawless(extension: Extension) -> Verdict:
    error = not_finite(extension.output_index)
    return Verdict(extension.request_id, 0, (), error=(type(error).__name__, str(error)))


def _with_logprobs(verdicts: list[Verdict], raw: Tensor, batch: _Batch) -> list[Verdict]:
    """The verdicts of requests that asked for logprobs, with one per emitted token."""
    asking = [i for i, e in enumerate(batch.extensions) if e.params.num_logprobs is not None]
    if not asking:
        return verdicts
    rows = [int(batch.first_row[i]) + k for i in asking for k in range(len(verdicts[i].token_ids))]
    token_ids = [token for i in asking for token in verdicts[i].token_ids]
    num_top = [batch.extensions[i].params.num_logprobs or 0 for i in asking for _ in verdicts[i].token_ids]
    found = iter(token_logprobs(raw, rows, token_ids, num_top))
    for i in asking:
        verdicts[i] = replace(verdicts[i], logprobs=tuple(next(found) for _ in verdicts[i].token_ids))
    return verdicts
