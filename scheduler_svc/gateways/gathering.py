"""Tokens of patient requests, until enough of them are there to be worth a frame."""

from dataclasses import dataclass
from itertools import accumulate

from scheduler_svc.core.sequence import Delivery, Group, Sequence

# A choice that has so many more than its gateway has heard of has all choices' told: from there on
# they fill in step, and a frame serves them all.
PATIENT_TOKENS = 32
# So many tokens of all together, those of log-probabilities included, are told as well: a frame
# stays far below what a gateway that does not read is cut off at.
HELD_TOKENS = 100_000


@dataclass(frozen=True, slots=True)
class _Patient:
    group: Group
    # By choice, the next index to tell.
    told: list[int]


class Gathering:
    """What has been delivered to patient requests and is not told yet.

    The tokens are their sequences' own; kept here is how far each choice was told. A first token is
    not kept waiting: it says when its request began to be served.
    """

    def __init__(self) -> None:
        # Some choice, or all together, have enough for all to be told.
        self.is_due = False
        # Since all were told; those that were told of alone count, too.
        self._num_held = 0
        # By their attachments.
        self._patients: dict[int, _Patient] = {}

    def add(self, group: Group) -> None:
        """A request that has been told all there is of it so far."""
        told = [len(sequence.delivered) for sequence in group.sequences]
        self._patients[group.attachment] = _Patient(group, told)

    def remove(self, attachment: int) -> None:
        """Tells no more of it. Of one that is not patient nothing changes."""
        self._patients.pop(attachment, None)

    def hold(self, delivery: Delivery) -> Delivery:
        """What of a delivery is to be told at once."""
        if not self._patients:
            return delivery
        places = self._urgent(delivery)
        return delivery if len(places) == len(delivery.attachments) else _part(delivery, places)

    def take_all(self) -> Delivery:
        """Everything that is not told yet; from here on it is."""
        self.is_due = False
        self._num_held = 0
        rest = Delivery()
        for patient in self._patients.values():
            for sequence in patient.group.sequences:
                _tell(rest, patient, sequence)
        return rest

    def take(self, sequence: Sequence) -> Delivery:
        """What is not told yet of one choice; from here on it is."""
        rest = Delivery()
        patient = self._patients.get(sequence.group.attachment)
        if patient is not None:
            _tell(rest, patient, sequence)
        return rest

    def _urgent(self, delivery: Delivery) -> list[int]:
        """Places of those that are not patient, and of first tokens. Runs in every step."""
        patients, places = self._patients, []
        for at, (attachment, choice, first, count) in enumerate(
            zip(
                delivery.attachments,
                delivery.choices,
                delivery.first_indices,
                delivery.num_tokens,
                strict=True,
            )
        ):
            patient = patients.get(attachment)
            if patient is None:
                places.append(at)
            elif first == 0:
                places.append(at)
                patient.told[choice] = count
            else:
                self._num_held += count * (1 + patient.group.params.num_logprobs)
                if first + count - patient.told[choice] >= PATIENT_TOKENS:
                    self.is_due = True
        self.is_due |= self._num_held >= HELD_TOKENS
        return places


def add_delivered(delivery: Delivery, attachment: int, sequence: Sequence, first: int) -> int:
    """Adds what a choice has been given from the index `first` on; returns the index behind it."""
    token_ids = sequence.delivered[first:].tolist()
    end = first + len(token_ids)
    if token_ids:
        delivery.attachments.append(attachment)
        delivery.choices.append(sequence.choice)
        delivery.first_indices.append(first)
        delivery.num_tokens.append(len(token_ids))
        delivery.token_ids += token_ids
        delivery.logprobs.append(sequence.logprobs_of(first, end))
    return end


def _tell(delivery: Delivery, patient: _Patient, sequence: Sequence) -> None:
    choice = sequence.choice
    patient.told[choice] = add_delivered(
        delivery, patient.group.attachment, sequence, patient.told[choice]
    )


def _part(delivery: Delivery, places: list[int]) -> Delivery:
    """These places of it."""
    starts = list(accumulate(delivery.num_tokens, initial=0))
    return Delivery(
        attachments=[delivery.attachments[at] for at in places],
        choices=[delivery.choices[at] for at in places],
        first_indices=[delivery.first_indices[at] for at in places],
        num_tokens=[delivery.num_tokens[at] for at in places],
        token_ids=[
            token_id
            for at in places
            for token_id in delivery.token_ids[starts[at] : starts[at + 1]]
        ],
        logprobs=[delivery.logprobs[at] for at in places] if delivery.logprobs else [],
    )
