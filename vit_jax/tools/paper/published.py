"""Results published in the ViT paper (arXiv 2010.11929v2).

`published.csv` has a row for each model of tables 2, 5 and 9. Results are
accuracies in percent, named as in `data.benchmarks`. The columns 'real' (ReaL
labels), 'objectnet' and 'objectnet/top5' (appendix D.9) are for models
fine-tuned on imagenet2012. 'vtab' is the unweighted mean of VTAB's 19 tasks.
Noisy Student's 88.4 on ImageNet is from its own paper; the ViT paper also
prints 88.5, from Touvron et al. (2020).
"""

import csv
import pathlib

# Accuracies by column, such as '88.4', or '88.55 ± 0.04': the mean and the
# standard deviation of three fine-tuning runs.
Results = dict[str, str]
# Columns of published.csv that are not results.
_FACTS = ('table', 'model', 'variant', 'pretraining')


def _table(number: int) -> list[tuple[dict[str, str], Results]]:
  """Returns the row and the non-empty results of each model of a table."""
  path = pathlib.Path(__file__).with_name('published.csv')
  rows = csv.DictReader(path.read_text(encoding='utf-8').splitlines())
  return [
    (row, {k: x for k, x in row.items() if x and k not in _FACTS})
    for row in rows
    if row['table'] == str(number)
  ]


TABLE_2 = {row['model']: results for row, results in _table(2)}
# Keys are (variant, pre-training data). Models are fine-tuned at 384 pixels.
TABLE_5 = {
  (row['variant'], row['pretraining']): results for row, results in _table(5)
}
TABLE_9 = {row['model']: results for row, results in _table(9)}
