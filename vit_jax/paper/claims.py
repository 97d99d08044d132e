"""The paper's claims, and those of papers around it: what is run to see.

A study is a grid of runs of configs/reproduce.py, three seeds each. A claim is
what a paper says, where, and the rule by which a study's runs support it; the
rules were written before the runs. Several claims share a study.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping

import numpy as np

from vit_jax.paper import measures, rules
from vit_jax.paper.rules import Quantity, Rule, SeedRuns

ACCURACY, FEWSHOT = 'test/accuracy', 'fewshot/10shot_accuracy'


@dataclasses.dataclass(frozen=True)
class FullSize:
  """A study at the size of the paper.

  Attributes:
    flags: of `vit_jax.main` after --workdir, config first.
    classes: of the data, for `plan`, which has them not at hand.
    examples: likewise.
  """

  flags: str
  classes: int = 1000
  examples: int = 1_281_167


@dataclasses.dataclass(frozen=True)
class Study:
  """A grid of runs.

  Attributes:
    what: is run, for readers.
    learned: a metric, and its least value in the best variant: below it
      nothing has been learned that could be compared.
    measure: of `measures.MEASURES`, for what evaluators do not tell.
    full_size: the commands of a study of the paper's size.
    data: what it needs, empty for images of any classes.
  """

  what: str
  learned: tuple[str, float] = (ACCURACY, 0.5)
  measure: str = ''
  full_size: tuple[FullSize, ...] = ()
  data: str = ''


@dataclasses.dataclass(frozen=True)
class Claim:
  """What a paper says, and what has to be found for it.

  Attributes:
    source: paper and section.
    sentence: in our own words.
    study: of `STUDIES`.
    rule: that judges.
    caption: of the picture.
    shown: metrics in the picture: one for every variant, or several (those that
      end in the number of a layer) as a line for each.
    against: the metric on the picture's other axis; empty for none.
  """

  source: str
  sentence: str
  study: str
  rule: Rule
  caption: str
  shown: tuple[str, ...] = (ACCURACY,)
  against: str = ''


IMAGENET = 'configs/vit.py:{},imagenet2012'
STUDIES: Mapping[str, Study] = {
  'posemb': Study(
    'A ViT of 16 patches with four kinds of position embeddings.',
    full_size=(
      FullSize(
        f'--config={IMAGENET.format("b16")} '
        '--sweep=model.posemb=none,learned1d,learned2d,relative '
        '--sweep=seed=0,1,2'
      ),
    ),
  ),
  'head': Study(
    'A ViT with a class token or the mean of its tokens, two rates each.',
    full_size=(
      FullSize(
        f'--config={IMAGENET.format("b16")} --sweep=model.pool=cls,gap '
        '--sweep=optimizer.lr=0.0003,0.001 --sweep=seed=0,1,2'
      ),
    ),
  ),
  'shape': Study(
    'A small ViT with one of depth, width, MLP and patches doubled (halved).',
    full_size=tuple(
      FullSize(f'--config={IMAGENET.format("b32")} {change}--sweep=seed=0,1,2')
      for change in (
        '',
        '--config.model.depth=24 ',
        '--config.model.width=1536 ',
        '--config.model.mlp_dim=6144 ',
        '--config.model.patch_size=16 ',
      )
    ),
  ),
  'axial': Study(
    'A ViT, and one with row and column attention in turns.',
    full_size=tuple(
      FullSize(f'--config={IMAGENET.format(model)} --sweep=seed=0,1,2')
      for model in ('b16', 'axial_b16')
    ),
  ),
  'resolution': Study(
    'A ViT fine-tuned where it was trained, and at twice the resolution.',
    full_size=tuple(
      FullSize(
        '--config=configs/finetune.py:b16,imagenet2012 '
        f'--config.init=vit/b16 --config.data.image_size={side} '
        '--sweep=seed=0,1,2'
      )
      for side in (224, 384)
    ),
  ),
  'inside': Study(
    'A ViT and a hybrid of 64 patches and 4 layers, looked into.',
    measure='inside',
    full_size=tuple(
      FullSize(f'--config={IMAGENET.format(model)} --sweep=seed=0,1,2')
      for model in ('l16', 'r50+l32')
    ),
  ),
  'data': Study(
    'A ViT and a ResNet on 100 examples (of other data 1 %) and on all.',
    full_size=tuple(
      FullSize(
        f'--config=configs/vit.py:{model},{data} --sweep=seed=0,1,2',
        classes,
        examples,
      )
      for model in ('l16', 'r50x2')
      for data, classes, examples in (
        ('imagenet2012', 1000, 1_281_167),
        ('imagenet21k', 21_843, 14_197_122),
      )
    ),
  ),
  'families': Study(
    'ViTs, ResNets and hybrids on the same images, and ten of each class.',
    full_size=(
      FullSize(
        '--config=configs/scaling.py:imagenet21k,imagenet2012',
        21_843,
        14_197_122,
      ),
    ),
  ),
  'optimizer': Study(
    'A ResNet trained with Adam and with SGD, two rates each.',
    full_size=tuple(
      FullSize(
        f'--config={IMAGENET.format("r50x1")} '
        f'--config.optimizer.name={name} --config.optimizer.weight_decay='
        f'{decay} --sweep=optimizer.lr={rates} --sweep=seed=0,1,2'
      )
      # That of SGD is a part of the gradient, as BiT has it.
      for name, decay, rates in (
        ('adam', 0.3, '0.0003,0.001'),
        ('sgd', 1e-4, '0.03,0.1'),
      )
    ),
  ),
  'masked': Study(
    'A ViT on 100 labels (of other data 1 %) from scratch, and after '
    'predicting masked patches.',
    full_size=tuple(
      FullSize(
        f'--config=configs/masked.py:b16 --config.objective.target={target} '
        f'--config.objective.rate={rate} --sweep=seed=0,1,2',
        21_843,
        14_197_122,
      )
      for target, rate in (
        ('mean_colour', 0.5),
        ('downsized', 0.5),
        ('pixels', 0.5),
        ('mean_colour', 0.15),
      )
    ),
  ),
  'deit': Study(
    'A ViT on 100 labels (of other data 1 %), alone and distilled from a '
    'ResNet of the same.',
    full_size=(
      FullSize(
        '--config=configs/deit.py:s16 --config.teacher=runs/teacher '
        '--sweep=seed=0,1,2'
      ),
    ),
  ),
  'noisy_student': Study(
    'Of 40 labelled digits (of other data one in 200): three generations of '
    'Noisy Student, or the labelled alone for as many images.',
    full_size=(
      FullSize('--config=configs/noisy_student.py:imagenet2012,compare'),
    ),
  ),
  'igpt': Study(
    'A causal iGPT of 11 x 11 pixels (of other data 16 x 16), for three '
    'lengths of training.',
    learned=('layer3/10shot_accuracy', 0.3),
    full_size=(
      FullSize('--config=configs/igpt.py:s,imagenet2012 --sweep=seed=0,1,2'),
    ),
  ),
  'detr': Study(
    'DETR on one to three digits on a canvas.',
    learned=('coco/AP', 0.1),
    measure='queries',
    full_size=(
      FullSize(
        '--config=configs/detr.py:r50,./coco --config.init=resnet50.pth '
        '--sweep=model.decoder_layers=1,6 --sweep=seed=0,1,2',
        91,
        118_287,
      ),
    ),
    data='digits',
  ),
}


def _more_data(runs: SeedRuns) -> float:
  gains = [
    runs[f'{model}, all'][ACCURACY] - runs[f'{model}, few'][ACCURACY]
    for model in ('ViT', 'ResNet')
  ]
  return gains[0] - gains[1]


def at_equal_compute(runs: SeedRuns, family: str, others: str) -> float:
  """Returns how much better a family is than another, where both have models.

  Between the other's models accuracy is interpolated over the logarithm of
  compute; nothing is said outside.

  Args:
    runs: of 'families'.
    family: 'ViT', 'R' or 'R+ViT', as names of models begin.
    others: likewise.
  """
  line = sorted(
    (math.log(run['gflops']), run[FEWSHOT])
    for name, run in runs.items()
    if family_of(name) == others
  )
  compute, accuracy = zip(*line, strict=True)
  found = [
    run[FEWSHOT] - float(np.interp(x, compute, accuracy))
    for name, run in runs.items()
    if family_of(name) == family
    and compute[0] <= (x := math.log(run['gflops'])) <= compute[-1]
  ]
  return statistics.mean(found) if found else math.nan


def family_of(name: str) -> str:
  """Returns 'ViT', 'R' or 'R+ViT' of a model's name."""
  kinds = [part.strip('0123456789x-') for part in name.split('+')]
  return '+'.join(kinds)


def _ranks(runs: SeedRuns) -> float:
  return rules.rank_correlation(
    [run[FEWSHOT] for run in runs.values()],
    [run[ACCURACY] for run in runs.values()],
  )


LAYER, DISTANCE = 'layer{}/10shot_accuracy', 'distance/{}'
LAYERS = tuple(map(LAYER.format, range(6)))
DISTANCES = tuple(map(DISTANCE.format, range(4)))


def _layers(run: Mapping[str, float], metric: str = LAYER) -> list[float]:
  """Returns a metric of each layer that a run has it of."""
  names = map(metric.format, range(100))
  return [run[name] for name in names if name in run]


def _resolutions(runs: SeedRuns) -> float:
  same, twice = (run[ACCURACY] for run in runs.values())
  return twice - same


def _middle(runs: SeedRuns) -> Quantity:
  first, *middle, last = _layers(runs['120 steps'])
  return [[layer - first, layer - last] for layer in middle]


def _likelihood(runs: SeedRuns) -> float:
  return rules.rank_correlation(
    [-run['test/loss'] for run in runs.values()],
    [max(_layers(run)) for run in runs.values()],
  )


def _grows(runs: SeedRuns) -> float:
  found = _layers(runs['ViT'], DISTANCE)
  return rules.rank_correlation(range(len(found)), found)


best = rules.difference
KINDS = ('learned1d', 'learned2d', 'relative')
TARGETS = ('mean colour', 'downsized', 'pixels')

CLAIMS: Mapping[str, Claim] = {
  'posemb': Claim(
    'ViT, D.4 and table 8',
    'Position embeddings of any kind are much better than none.',
    'posemb',
    Rule(
      'accuracy of the worst kind less that without, above 0',
      rules.worst_difference(ACCURACY, KINDS, 'none'),
      low=0,
    ),
    'Test accuracy with each kind of position embedding (table 8).',
  ),
  'posemb_kind': Claim(
    'ViT, D.4 and table 8',
    'Which kind of position embedding it is makes little difference.',
    'posemb',
    Rule(
      'best less worst kind, below 2 points',
      rules.spread(ACCURACY, KINDS),
      high=0.02,
    ),
    'Test accuracy with each kind of position embedding (table 8).',
  ),
  'head': Claim(
    'ViT, D.3 and figure 9',
    'Class token and mean of the tokens are equally good, each at its own '
    'learning rate.',
    'head',
    Rule(
      'class token less mean, each at its best rate, within 1.5 points',
      best(
        ACCURACY, ('cls, 0.001', 'cls, 0.003'), ('gap, 0.001', 'gap, 0.003')
      ),
      low=-0.015,
      high=0.015,
    ),
    'Test accuracy of both heads at both learning rates (figure 9).',
  ),
  'depth': Claim(
    'ViT, D.2 and figure 8',
    'Of depth, width and MLP, more depth helps most.',
    'shape',
    Rule(
      'twice the depth less the best of twice the width and MLP, above 0',
      best(ACCURACY, ('depth',), ('width', 'MLP')),
      low=0,
    ),
    'Test accuracy over compute with one dimension doubled (figure 8).',
    against='gflops',
  ),
  'width': Claim(
    'ViT, D.2 and figure 8',
    'More width changes least of the dimensions.',
    'shape',
    Rule(
      'the worse of twice the depth and half the patch less twice the width, '
      'above 0',
      rules.worst_difference(ACCURACY, ('depth', 'patch'), 'width'),
      low=0,
    ),
    'Test accuracy over compute with one dimension doubled (figure 8).',
    against='gflops',
  ),
  'patch': Claim(
    'ViT, D.2 and figure 8',
    'Smaller patches, more tokens, help without more parameters.',
    'shape',
    Rule(
      'half the patch less the small model, above 0',
      best(ACCURACY, ('patch',), ('small',)),
      low=0,
    ),
    'Test accuracy over compute with one dimension doubled (figure 8).',
    against='gflops',
  ),
  'axial_gain': Claim(
    'ViT, D.6 and figure 13',
    'Axial attention is more accurate than the ViT that it is made of.',
    'axial',
    Rule(
      'Axial-ViT less ViT, above 0',
      best(ACCURACY, ('Axial-ViT',), ('ViT',)),
      low=0,
    ),
    'Test accuracy over compute of both (figure 13).',
    against='gflops',
  ),
  'axial_cost': Claim(
    'ViT, D.6 and figure 13',
    'And it takes more compute.',
    'axial',
    Rule(
      'GFLOPs of Axial-ViT over those of the ViT, above 1',
      lambda runs: runs['Axial-ViT']['gflops'] / runs['ViT']['gflops'],
      low=1,
    ),
    'GFLOPs of one image.',
    shown=('gflops',),
  ),
  'resolution': Claim(
    'ViT, 3.2',
    'Fine-tuning at a higher resolution than that of pre-training helps.',
    'resolution',
    Rule(
      'twice the resolution less the same, above 0',
      _resolutions,
      low=0,
    ),
    'Test accuracy after fine-tuning.',
  ),
  'filters': Claim(
    'ViT, 4.5 and figure 7 (left)',
    'The patch embedding learns few directions: basis functions of the fine '
    'structure in a patch.',
    'inside',
    Rule(
      'share of the variance of the filters in a quarter of their principal '
      'components less that of random filters, above 0.1',
      lambda runs: runs['ViT']['filters/share'] - runs['ViT']['filters/random'],
      low=0.1,
    ),
    "Share of the filters' variance in the first quarter of components.",
    shown=('filters/share', 'filters/random'),
  ),
  'positions': Claim(
    'ViT, 4.5 and figure 7 (centre)',
    'Patches that are near have similar position embeddings.',
    'inside',
    Rule(
      'minus the correlation of similarity with distance, above 0.1',
      lambda runs: runs['ViT']['positions/nearness'],
      low=0.1,
    ),
    "Minus the correlation of the embeddings' cosine with distance.",
    shown=('positions/nearness',),
  ),
  'distance': Claim(
    'ViT, 4.5 and figure 7 (right)',
    'The distance over which layers attend grows with depth.',
    'inside',
    Rule(
      'rank correlation of layer and mean attention distance, above 0',
      _grows,
      low=0,
    ),
    'Mean attention distance in patches, by layer (figure 7).',
    shown=DISTANCES,
  ),
  'global': Claim(
    'ViT, 4.5 and figure 7 (right)',
    'In the lowest layer some heads attend to most of the image already, '
    'farther than a convolution can.',
    'inside',
    Rule(
      'distance of the farthest head of the first layer less that of a 3 x 3 '
      'convolution (1.07 patches), above 1 patch',
      lambda runs: runs['ViT']['distance/farthest'] - measures.CONVOLUTION,
      low=1,
    ),
    "Attention distance of the first layer's farthest head, in patches.",
    shown=('distance/farthest',),
  ),
  'hybrid_distance': Claim(
    'ViT, 4.5 and figure 11',
    'Hybrids attend less locally in their lowest layer.',
    'inside',
    Rule(
      'distance in the first layer of the hybrid less that of the ViT, above 0',
      best('distance/0', ('hybrid',), ('ViT',)),
      low=0,
    ),
    'Mean attention distance in patches, by layer (figure 11).',
    shown=DISTANCES,
  ),
  'rollout': Claim(
    'Attention rollout (2005.00928) as often refined',
    'Rollout by the maximum of heads, low weights discarded, isolates what '
    'matters better than by the mean.',
    'inside',
    Rule(
      'accuracy without the 30 % highest pixels of the mean less that without '
      'those of the maximum, above 0',
      lambda runs: runs['ViT']['masking/mean'] - runs['ViT']['masking/max'],
      low=0,
    ),
    'Accuracy without the pixels of highest rollout: lower is better.',
    shown=('masking/mean', 'masking/max'),
  ),
  'more_data': Claim(
    'ViT, 4.3 and figures 3 and 4',
    'More data help ViT more than a ResNet.',
    'data',
    Rule('gain of the ViT less that of the ResNet, above 0', _more_data, low=0),
    'Test accuracy on few and on all examples (figure 4).',
  ),
  'little_data': Claim(
    'ViT, 4.3 and figures 3 and 4',
    'On little data the ResNet is ahead.',
    'data',
    Rule(
      'ResNet less ViT on few examples, above 0',
      best(ACCURACY, ('ResNet, few',), ('ViT, few',)),
      low=0,
    ),
    'Test accuracy on few and on all examples (figure 4).',
  ),
  'compute': Claim(
    'ViT, 4.4 and figure 5',
    'At equal compute ViT is better than ResNets.',
    'families',
    Rule(
      "ViT less ResNets, interpolated at the ResNets' compute, above 0",
      lambda runs: -at_equal_compute(runs, 'R', 'ViT'),
      low=0,
    ),
    'Few-shot accuracy over GFLOPs an image (figure 5).',
    shown=(FEWSHOT,),
    against='gflops',
  ),
  'hybrids': Claim(
    'ViT, 4.4 and figure 5',
    'At small compute hybrids are ahead of ViT.',
    'families',
    Rule(
      "hybrids less ViT, interpolated at the hybrids' compute, above 0",
      lambda runs: at_equal_compute(runs, 'R+ViT', 'ViT'),
      low=0,
    ),
    'Few-shot accuracy over GFLOPs an image (figure 5).',
    shown=(FEWSHOT,),
    against='gflops',
  ),
  'fewshot': Claim(
    'ViT, 4.1 and 4.3',
    'Few-shot accuracy, cheap to measure, ranks models as training on all '
    'labels does.',
    'families',
    Rule('rank correlation over the models, above 0.5', _ranks, low=0.5),
    'Few-shot accuracy over accuracy with all labels, a dot a model.',
    shown=(FEWSHOT,),
    against=ACCURACY,
  ),
  'adam': Claim(
    'ViT, D.1 and table 7',
    'ResNets trained with Adam are at least as good as with SGD.',
    'optimizer',
    Rule(
      'Adam less SGD, each at its best rate, above -1 point',
      best(ACCURACY, ('adam, 0.001', 'adam, 0.003'), ('sgd, 0.03', 'sgd, 0.1')),
      low=-0.01,
    ),
    'Test accuracy at each learning rate.',
  ),
  'masked': Claim(
    'ViT, 4.6 and B.1.2',
    'Predicting masked patches first is better than from scratch.',
    'masked',
    Rule(
      'after mean colours less from scratch, above 0',
      best(ACCURACY, ('mean colour',), ('from scratch',)),
      low=0,
    ),
    'Test accuracy of few labels, after each pre-training.',
  ),
  'masked_target': Claim(
    'ViT, B.1.2',
    'Mean colours, small images and all pixels are about equal targets.',
    'masked',
    Rule(
      'best less worst target, below 3 points',
      rules.spread(ACCURACY, TARGETS),
      high=0.03,
    ),
    'Test accuracy of few labels, after each pre-training.',
  ),
  'masked_rate': Claim(
    'ViT, B.1.2',
    'Corrupting 15 % of the patches is slightly worse than 50 %.',
    'masked',
    Rule(
      '50 % less 15 %, above 0',
      best(ACCURACY, ('mean colour',), ('mean colour, 15 %',)),
      low=0,
    ),
    'Test accuracy of few labels, after each pre-training.',
  ),
  'igpt_layers': Claim(
    'iGPT, 4.1 and figure 2',
    'The best representation is in the middle of the model.',
    'igpt',
    Rule(
      'best layer between first and last less the better of these, above 0',
      _middle,
      low=0,
    ),
    'Accuracy of a probe of ten images a class, by layer.',
    shown=LAYERS,
  ),
  'igpt_likelihood': Claim(
    'iGPT, 4.2 and figure 3',
    'The better the likelihood, the better the representation.',
    'igpt',
    Rule(
      "rank correlation of likelihood with the best layer's probe, above 0",
      _likelihood,
      low=0,
    ),
    'Accuracy of a probe of the fourth layer over the test loss (nats).',
    shown=('layer3/10shot_accuracy',),
    against='test/loss',
  ),
  'deit': Claim(
    'DeiT, table 3',
    'A convolutional teacher and a distillation token make a better ViT.',
    'deit',
    Rule(
      'with the token less without a teacher, above 0',
      best(ACCURACY, ('distillation token',), ('without a teacher',)),
      low=0,
    ),
    'Test accuracy with and without a teacher.',
  ),
  'noisy_student': Claim(
    'Noisy Student, table 2',
    "A student of unlabelled images and noise is better than its teacher's "
    'labels alone.',
    'noisy_student',
    Rule(
      'Noisy Student less supervised, above 0',
      best(ACCURACY, ('noisy student',), ('supervised',)),
      low=0,
    ),
    'Test accuracy of Noisy Student and of the labelled alone.',
  ),
  'detr_queries': Claim(
    'DETR, 4.3 and figure 7',
    'Each query specialises in places of the image.',
    'detr',
    Rule(
      "standard deviation over queries of their boxes' mean centre, above a "
      'twentieth of the side',
      lambda runs: runs['3 layers']['queries/spread'],
      low=0.05,
    ),
    "Standard deviation over queries of their boxes' mean centre, in sides.",
    shown=('queries/spread',),
  ),
  'detr_layers': Claim(
    'DETR, 4.2 and figure 4',
    'More decoder layers are better.',
    'detr',
    Rule(
      'AP of three layers less that of one, above 0',
      best('coco/AP', ('3 layers',), ('1 layer',)),
      low=0,
    ),
    'Average precision of each DETR.',
    shown=('coco/AP',),
  ),
  'detr_no_object': Claim(
    'DETR, 3.1',
    'Queries that find no object have to weigh little (0.1) in the loss.',
    'detr',
    Rule(
      'AP of a weight of 0.1 less that of 1, above 0',
      best('coco/AP', ('3 layers',), ('no object 1',)),
      low=0,
    ),
    'Average precision of each DETR.',
    shown=('coco/AP',),
  ),
}
