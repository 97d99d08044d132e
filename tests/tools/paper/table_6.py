"""Table 6 of the paper (arXiv 2010.11929v2): compute of pre-training."""

from typing import NamedTuple

# Images of JFT, in which the table counts its epochs.
JFT_IMAGES = 303e6


class Pretrained(NamedTuple):
  """A model pre-trained on JFT-300M.

  Attributes:
    model: the printed name.
    variant: of `models.variants`.
    epochs: of pre-training.
    exaflops: of pre-training, 3 x forward x images, a multiply-add as two.
  """

  model: str
  variant: str
  epochs: int
  exaflops: int


TABLE_6 = (
  Pretrained('ViT-B/32', 'b32', 7, 55),
  Pretrained('ViT-B/16', 'b16', 7, 224),
  Pretrained('ViT-L/32', 'l32', 7, 196),
  Pretrained('ViT-L/16', 'l16', 7, 783),
  Pretrained('ViT-L/16', 'l16', 14, 1567),
  Pretrained('ViT-H/14', 'h14', 14, 4262),
  Pretrained('R50x1', 'r50x1', 7, 50),
  Pretrained('R50x2', 'r50x2', 7, 199),
  Pretrained('R101x1', 'r101x1', 7, 96),
  Pretrained('R152x1', 'r152x1', 7, 141),
  Pretrained('R152x2', 'r152x2', 7, 563),
  Pretrained('R152x2', 'r152x2', 14, 1126),
  Pretrained('R200x3', 'r200x3', 14, 3306),
  Pretrained('R50+ViT-B/32', 'r50+b32', 7, 106),
  Pretrained('R50+ViT-B/16', 'r50+b16', 7, 274),
  Pretrained('R50+ViT-L/32', 'r50+l32', 7, 246),
  Pretrained('R50+ViT-L/16', 'r50+l16', 7, 859),
  Pretrained('R50+ViT-L/16', 'r50+l16', 14, 1668),
)
