"""Reads handwritten digits row by row with an LLTM, a recurrent network."""

from mindspore import nn

import msops
from common import learn_digits, options


class RowReader(nn.Cell):
    """Maps images (N, 1, 8, 8) to scores of the ten digits (N, 10), by the state of the LLTM after the last row."""

    def __init__(self, hidden_size):
        super().__init__()
        self.dropout = nn.Dropout(p=0.1)
        self.lltm = msops.LLTM(8, hidden_size, batch_first=True)
        self.classifier = nn.Dense(hidden_size, 10)

    def construct(self, images):
        images = self.dropout(images)  # missing pixels keep it from learning the training images by heart
        _, (h, _) = self.lltm(images[:, 0])
        return self.classifier(h[0])


if __name__ == "__main__":
    args = options(__doc__, "epochs", 30)
    learn_digits(RowReader(hidden_size=128), args, "rows", required=0.95)
