"""Pictures of a checkpoint as one self-contained page."""

import base64
import html
import string
from collections.abc import Callable

import numpy as np

from vit_jax.visualize import draw, sections
from vit_jax.visualize.photos import Subject
from vit_jax.visualize.sections import Section

# Numbers of classes to draw a rollout for and to list, the likeliest first.
_CLASSES = 2
_LABELS = 5

_PAGE = string.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<link rel="icon" href="data:,">
<style>
  :root { color-scheme: light; }
  body { margin: 0 auto; max-width: 75rem; padding: 0 1rem 3rem;
    font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
  h1 { font-size: 1.5rem; overflow-wrap: anywhere; margin-bottom: 0; }
  h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
  h3 { margin: 1.5rem 0 0.5rem; overflow-wrap: anywhere; }
  p { max-width: 45rem; }
  nav a { margin-right: 1rem; }
  .images { display: grid; gap: 0.75rem;
    grid-template-columns: repeat(auto-fill, minmax(min(9rem, 45%), 1fr)); }
  @media (max-width: 30rem) {
    .images figure:first-child { grid-column: 1 / -1; }
  }
  figure { margin: 0; }
  figure img { display: block; width: 100%; height: auto; }
  .wide { overflow-x: auto; margin-bottom: 1rem; }
  .wide img { width: auto; max-width: none; }
  .fitting img { width: auto; max-width: 100%; }
  figcaption { font-size: 0.875rem; color: #555; overflow-wrap: anywhere; }
  table { border-collapse: collapse; margin-bottom: 0.75rem; }
  td { padding: 0 1rem 0 0; font-variant-numeric: tabular-nums; }
  .none { color: #555; font-style: italic; }
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")


def report(subject: Subject, fusion: str, discard: float) -> str:
  """Rollout, attention, distance, filters and posemb as one HTML file.

  If the model does not support a part, the page says why instead.
  """
  checkpoint = subject.checkpoint
  parts: dict[str, Callable[[], str]] = {
    'Images': lambda: _images(subject, fusion, discard),
    # All heads of a large model make a wide picture, which scrolls on a phone.
    'Attention': lambda: _plots(sections.attention(subject), 'wide'),
    'Distance': lambda: _plots(sections.distance(subject)),
    'Filters': lambda: _plots(sections.first_filters(subject)),
    'Position embeddings': lambda: _plots(sections.posemb(subject)),
  }
  body, links = [], []
  for i, (title, make) in enumerate(parts.items()):
    try:
      content = make()
    except ValueError as e:
      content = f'<p class="none">{html.escape(str(e))}</p>'
    body.append(f'<h2 id="part{i}">{title}</h2>\n{content}')
    links.append(f'<a href="#part{i}">{title}</a>')
  about = html.escape(f'{checkpoint.describe()}.')
  body = [f'<p>{about}</p>', f'<nav>{" ".join(links)}</nav>', *body]
  title = html.escape(checkpoint.path)
  return _PAGE.substitute(title=title, body='\n'.join(body))


def _images(subject: Subject, fusion: str, discard: float) -> str:
  """Returns HTML of each image: its likeliest classes and its rollouts."""
  whole = sections.rollout(subject, fusion, discard)
  name_of = subject.checkpoint.class_name
  labels: list[list[tuple[int, float]]] = []
  explained = []
  if 'logits' in subject.checkpoint.model.vectors:
    for layers, batch in subject.at_work('labels'):
      p_BC = np.asarray(subject.checkpoint.probabilities(layers.logits_BC))
      for p_C in p_BC[: len(batch)]:
        order = np.argsort(-p_C, kind='stable')[:_LABELS]
        labels.append([(int(c), float(p_C[c])) for c in order])
    for class_N in np.array(labels)[:, :_CLASSES, 0].astype(int).T:
      maps_Nhw = sections.rollout_maps(subject, fusion, discard, class_N)
      explained.append(maps_Nhw)
  lines = [f'<p>{html.escape(whole.text)}</p>']
  for n, photograph in enumerate(subject.photographs):
    maps = {'whole image': whole.arrays['maps'][0, n]}
    for k, of_class_Nhw in enumerate(explained):
      maps[name_of(labels[n][k][0])] = of_class_Nhw[n]
    lines.append(f'<h3>{html.escape(photograph.name)}</h3>')
    if labels:
      rows = (
        f'<tr><td>{html.escape(name_of(c))}</td><td>{p:.1%}</td></tr>'
        for c, p in labels[n]
      )
      lines.append(f'<table>{"".join(rows)}</table>')
    lines.append('<div class="images">')
    pictures = {'image': (shown_HWC := photograph.shown())}
    for name, map_hw in maps.items():
      pictures |= sections.over(shown_HWC, map_hw, name)
    lines += [_figure(draw.png(x), caption) for caption, x in pictures.items()]
    lines.append('</div>')
  return '\n'.join(lines)


def _plots(section: Section, kind: str = 'fitting') -> str:
  """Returns HTML of a section's text and pictures; `kind` is a CSS class."""
  figures = [_figure(x.draw(), x.caption, kind) for x in section.figures]
  return '\n'.join([f'<p>{html.escape(section.text)}</p>', *figures])


def _figure(png: bytes, caption: str, kind: str = '') -> str:
  """Returns HTML of a picture with its caption; `kind` is a CSS class."""
  data = base64.b64encode(png).decode()
  caption = html.escape(caption)
  return (
    f'<figure class="{kind}"><img src="data:image/png;base64,{data}" '
    f'alt="{caption}"><figcaption>{caption}</figcaption></figure>'
  )
