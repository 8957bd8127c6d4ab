"""vLLM's definitions of what changes logits, written out: one row, one token after another."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import TypicalLogitsWarper

from worker_svc.plan.logits_params import LogitsParams

_IMPOSSIBLE = float("-inf")


@dataclass(eq=False)
class ReferenceRow:
    """A sequence, and the parameters of its logits."""

    params: LogitsParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    def apply(self, logits: Tensor) -> Tensor:
        """The changed logits `[vocab_size]`, in vLLM's order."""
        logits = logits.clone()
        self._allow(logits)
        self._exclude_bad_words(logits)
        self._exclude_stop_tokens(logits)
        self._bias(logits)
        self._penalize(logits)
        return logits

    def keep_typical(self, logits: Tensor, temperature: float) -> Tensor:
        """By transformers' class, in double precision."""
        if self.params.typical_p == 1 or temperature == 0:
            return logits
        warper = TypicalLogitsWarper(mass=self.params.typical_p)
        no_tokens = torch.empty(1, 0, dtype=torch.long)
        kept = warper(no_tokens, logits.double()[None] / temperature)
        return logits.masked_fill(kept[0] == _IMPOSSIBLE, _IMPOSSIBLE)

    def _allow(self, logits: Tensor) -> None:
        allowed = set(self.params.allowed_token_ids.tolist())
        for token in range(len(logits)):
            if allowed and token not in allowed:
                logits[token] = _IMPOSSIBLE

    def _exclude_bad_words(self, logits: Tensor) -> None:
        for word in self.params.bad_words:
            *prefix, last = word.tolist()
            if len(prefix) > len(self.output):
                continue
            if self.output[len(self.output) - len(prefix) :] == prefix:
                logits[last] = _IMPOSSIBLE

    def _exclude_stop_tokens(self, logits: Tensor) -> None:
        if len(self.output) < self.params.min_tokens:
            for token in self.params.stop_token_ids.tolist():
                logits[token] = _IMPOSSIBLE

    def _bias(self, logits: Tensor) -> None:
        for token, bias in zip(self.params.bias_token_ids, self.params.biases, strict=True):
            logits[int(token)] += float(bias)

    def _penalize(self, logits: Tensor) -> None:
        penalty = torch.tensor(self.params.repetition_penalty)
        for token in set(self.prompt) | set(self.output):
            logit = logits[token]
            logits[token] = logit / penalty if logit > 0 else logit * penalty
        for token in set(self.output):
            count = self.output.count(token)
            logits[token] -= torch.tensor(self.params.frequency_penalty) * count
            logits[token] -= torch.tensor(self.params.presence_penalty)
