"""RunImage: the state of every row of a verify step, as `DeviceImage` is of slots: kernels take one as the other.

Legend: B requests, K draft steps, R = B (K + 1) rows, E entries of all slots.
"""

import torch

from gpu_sampler.device_image import DeviceImage


class RunImage:
    """For steps of up to `requests` requests with `steps` drafts each. Row r has slot r + 1, and slot 0 is padding.
    Side lists and entries of row i of a request lie where those of its slot do, i x E places on. 24 (K + 1) bytes an
    entry."""

    def __init__(self, image: DeviceImage, requests: int, steps: int) -> None:
        """ValueError where the entries would be more than an i32 counts."""
        self.requests, self.steps, self.entries = requests, steps, len(image.entry_ids)
        self.vocab_size, self.device = image.vocab_size, image.device
        places, rows = self.entries * (steps + 1), requests * (steps + 1)
        if places >= 2**31:
            raise ValueError(
                f"got {places} entries of verify rows, expected fewer than 2^31: take fewer overlay entries"
            )
        self.table = image.table[:1].repeat(rows + 1, 1)
        self.masks = image.masks
        self.slots = torch.zeros(rows, dtype=torch.int32, device=self.device)
        ints = torch.zeros((3, places), dtype=torch.int32, device=self.device)
        floats = torch.zeros((3, places), device=self.device)
        self.entry_ids, self.entry_counts, self.side_ids = ints
        self.entry_bias, self.side_raw, self.side_processed = floats


SlotImage = DeviceImage | RunImage
