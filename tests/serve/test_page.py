"""The page in Chromium, where that and Playwright are installed."""

import shutil

import pytest

from tests.serve.test_server import checkpoint_of, running
from vit_jax.convert import board

sync_api = pytest.importorskip(
  'playwright.sync_api', reason='needs pip install playwright'
)
CHROMIUM = shutil.which('chromium')
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not CHROMIUM, reason='needs apt install chromium'),
]


@pytest.mark.parametrize('size', [(1280, 900), (390, 844)], ids=str)
def test_an_image_is_looked_at_with_the_keyboard_alone(tmp_path, size):
  folder = tmp_path / 'board'
  board.write(checkpoint_of(), str(folder), 'float32')
  board.write_model(checkpoint_of(), folder / 'models', 'other', 'float32')
  with running(folder) as (port, _), sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(
      executable_path=CHROMIUM, args=['--no-sandbox']
    )
    page = browser.new_page(viewport={'width': size[0], 'height': size[1]})
    complaints = []
    page.on('console', lambda message: complaints.append(message.text))
    page.on('pageerror', lambda error: complaints.append(str(error)))
    page.goto(f'http://127.0.0.1:{port}/')
    page.get_by_label('A cat').focus()
    page.keyboard.press('Enter')
    page.locator('li').nth(9).wait_for()
    assert page.locator('article').count() == 2
    drawn = page.locator('article canvas').first
    before = drawn.evaluate('canvas => canvas.toDataURL()')
    if size[0] < 900:
      page.locator('summary').focus()
      page.keyboard.press('Enter')
    page.get_by_label('Layer', exact=True).focus()
    page.keyboard.press('ArrowRight')
    # The page allows no scripts that a test would wait with.
    while drawn.evaluate('canvas => canvas.toDataURL()') == before:
      page.wait_for_timeout(50)
    assert page.locator('#layer-said').inner_text() == '1 of 3'
    assert 'gradients' in page.locator('#note').inner_text()
    assert page.evaluate('document.documentElement.scrollWidth') == size[0]
    assert complaints == []
    browser.close()
