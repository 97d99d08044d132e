"""The page in Chromium, where that and Playwright are installed.

Shots of it are kept in the folder that $PAGE_SHOTS names.
"""

import os
import shutil

import pytest

from tests.checkpoints.random_weights import random_checkpoint
from tests.tools.serve.test_server import DETR, checkpoint_of, running
from vit_jax.tools.serve import board

REASON = 'needs the extra `test`'
sync_api = pytest.importorskip('playwright.sync_api', reason=REASON)
axe = pytest.importorskip('axe_playwright_python.sync_playwright')
CHROMIUM = shutil.which('chromium')
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not CHROMIUM, reason='needs apt install chromium'),
]
SIZES = {'desktop': (1280, 900), 'phone': (390, 844)}


@pytest.fixture(scope='module')
def port(tmp_path_factory):
  """Serves two models that classify and one that finds objects."""
  folder = tmp_path_factory.mktemp('page') / 'board'
  board.write(checkpoint_of(), str(folder), 'float32')
  board.write_model(checkpoint_of(), folder / 'models', 'other', 'float32')
  detr = random_checkpoint(None, (48, 48), **DETR)
  board.write_model(detr, folder / 'models', 'things', 'float32')
  with running(folder, '--threads=1') as (port, _):
    yield port


@pytest.fixture(scope='module')
def browser():
  """With a camera that films a test pattern, and nobody asked for it."""
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(
      executable_path=CHROMIUM,
      args=[
        '--no-sandbox',
        '--use-fake-device-for-media-stream',
        '--use-fake-ui-for-media-stream',
      ],
    )
    yield browser
    browser.close()


class Visitor:
  """Somebody at the page, who has a keyboard."""

  def __init__(self, page, name):
    self.page, self._name = page, name
    self.complaints = []
    page.on('console', lambda message: self.complaints.append(message.text))
    page.on('pageerror', lambda error: self.complaints.append(str(error)))

  def reach(self, locator):
    """Presses Tab until something is focused, and seen to be."""
    for _ in range(60):
      if locator.evaluate('element => element === document.activeElement'):
        break
      self.page.keyboard.press('Tab')
    else:
      raise AssertionError(f'{locator} is not reached with Tab')

  def press(self, locator, key='Enter'):
    self.reach(locator)
    self.page.keyboard.press(key)

  def until(self, condition):
    """Waits, which the page allows no scripts that a test would wait with."""
    for _ in range(600):
      if condition():
        return
      self.page.wait_for_timeout(50)
    raise AssertionError(self.page.inner_text('body'))

  def check(self, what):
    """Runs axe-core, and looks at what is as wide as it may be."""
    results = axe.Axe().run(self.page).response
    assert results['passes']
    serious = [
      (x['id'], [node['html'] for node in x['nodes']])
      for x in results['violations']
      if x['impact'] in ('serious', 'critical')
    ]
    assert serious == []
    width = self.page.viewport_size['width']
    assert self.page.evaluate('document.documentElement.scrollWidth') == width
    assert self.complaints == []
    if folder := os.environ.get('PAGE_SHOTS'):
      self.page.screenshot(path=f'{folder}/{self._name}-{what}.png')


@pytest.fixture(params=SIZES)
def visitor(browser, port, request):
  width, height = SIZES[request.param]
  page = browser.new_page(viewport={'width': width, 'height': height})
  page.goto(f'http://127.0.0.1:{port}/')
  yield Visitor(page, request.param)
  page.close()


def open_settings(visitor):
  if visitor.page.viewport_size['width'] < 900:
    visitor.press(visitor.page.locator('summary'))


def test_an_image_is_looked_at_with_the_keyboard_alone(visitor):
  page = visitor.page
  visitor.check('empty')
  visitor.press(page.get_by_label('A cat'))
  page.locator('li').nth(9).wait_for()
  assert page.locator('article').count() == 2
  drawn = page.locator('article canvas').first
  before = drawn.evaluate('canvas => canvas.toDataURL()')
  open_settings(visitor)
  visitor.press(page.get_by_label('Layer', exact=True), 'ArrowRight')
  visitor.until(
    lambda: drawn.evaluate('canvas => canvas.toDataURL()') != before
  )
  assert page.locator('#layer-said').inner_text() == '1 of 3'
  visitor.press(page.locator('#top'), 'ArrowLeft')
  visitor.until(lambda: page.locator('li').count() == 8)
  assert 'gradients' in page.locator('#note').inner_text()
  visitor.check('classes')


def test_a_photograph_is_taken_and_its_objects_are_shown(visitor):
  """With the keyboard alone, too; one object is shown alone."""
  page = visitor.page
  visitor.press(page.locator('#second'), 'Home')
  # By its name, as one types in a list.
  visitor.reach(page.locator('#first'))
  page.keyboard.type('things')
  visitor.until(lambda: page.locator('article').count() == 1)
  visitor.press(page.locator('#photograph'))
  visitor.until(
    lambda: page.locator('#video').evaluate('video => video.videoWidth')
  )
  visitor.check('camera')
  visitor.press(page.locator('#take'))
  visitor.until(lambda: 'things: ' in page.inner_text('#message'))
  open_settings(visitor)
  visitor.press(page.locator('#threshold'), 'Home')
  visitor.until(lambda: page.locator('li button').count() == 6)
  assert page.locator('.box:visible').count() == 6
  assert page.locator('#map-settings').is_hidden()
  first = page.locator('li button').first
  visitor.press(first)
  visitor.until(lambda: page.locator('.box:visible').count() == 1)
  assert first.get_attribute('aria-pressed') == 'true'
  box, image = (
    page.locator(x).first.bounding_box()
    for x in ('.box:visible', 'article img')
  )
  assert box['x'] >= image['x'] - 1 and box['y'] >= image['y'] - 1
  assert box['x'] + box['width'] <= image['x'] + image['width'] + 1
  assert box['y'] + box['height'] <= image['y'] + image['height'] + 1
  visitor.check('objects')


def test_a_file_is_chosen_and_a_damaged_one_said(visitor, tmp_path):
  page = visitor.page
  (tmp_path / 'x.png').write_bytes(b'no image')
  page.locator('#file').set_input_files(tmp_path / 'x.png')
  visitor.until(
    lambda: 'image of a known format' in page.inner_text('#message')
  )
  assert any('422' in line for line in visitor.complaints)
  visitor.complaints.clear()
  visitor.check('damaged')


def test_a_good_image_after_a_damaged_one_is_labelled(visitor, tmp_path):
  """Also where it is given before the first one is answered."""
  page = visitor.page
  held = []

  def hold(route):
    if held:
      route.continue_()
    else:
      held.append(route)

  page.route('**/api/predict*', hold)
  (tmp_path / 'x.png').write_bytes(b'no image')
  page.locator('#file').set_input_files(tmp_path / 'x.png')
  visitor.until(lambda: held)
  page.get_by_label('A cat').click()
  page.wait_for_timeout(200)
  held[0].continue_()
  page.locator('li').nth(9).wait_for()
  assert 'image of a known format' not in page.inner_text('#message')
