"""The noise of the torch sampler, word for word."""

import pytest
import torch

from gpu_sampler.device_noise import RowNoise, gumbels, philox_words
from gpu_sampler.reference.philox import Purpose
from gpu_sampler.testing.slow import slow_gumbel

ON = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def ids(words: list[int], device: str) -> list[torch.Tensor]:
    return [torch.tensor(word, device=device) for word in words]


@ON
@pytest.mark.parametrize(
    ("counter", "seed", "expected"),
    [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_words_are_the_known_answers_of_random123(
    counter: list[int], seed: int, expected: list[int], device: str
) -> None:
    c0, c1, c2, c3 = ids(counter, device)
    assert [int(word) for word in philox_words((c0, c1, c2, c3), torch.tensor(seed, device=device))] == expected


def test_noise_of_blocks_and_of_ids_is_the_same_number_for_an_id() -> None:
    noise = RowNoise(torch.tensor([5, -9]), torch.tensor([3, 2**31 - 1]), torch.tensor([0, 7]))
    first = torch.tensor([0, 128])
    blocks = noise.of_blocks(Purpose.SAMPLE_TOKEN, first, 100, 3)
    assert torch.equal(blocks, noise.of_ids(Purpose.SAMPLE_TOKEN, first[:, None] + torch.arange(100), 3))
    slow = slow_gumbel(2**64 - 9, 2**31 - 1, 7, Purpose.SAMPLE_TOKEN, 134, 3)
    assert blocks[1, 6].item() == pytest.approx(slow, rel=1e-6)
    assert gumbels(torch.tensor([0xFFFFFFFF])).item() == pytest.approx(-2.8115, abs=1e-3)
