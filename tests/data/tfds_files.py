"""The description of a dataset that TFDS leaves in its folder."""

import json


def write_info(folder, name, splits, keys, file_format='array_record'):
  """Takes the numbers of examples in the shards of each split."""
  base, _, config = name.partition('/')
  info = {
    'name': base,
    'version': folder.name,
    'fileFormat': file_format,
    'splits': [
      {
        'name': split,
        'shardLengths': [str(length) for length in shards],
        'numBytes': '1000',
        'filepathTemplate': '{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}',
      }
      for split, shards in splits.items()
    ],
  }
  if config:
    info['configName'] = config
  if keys:
    items = [{'featureKey': key} for key in keys]
    info['supervisedKeys'] = {'tuple': {'items': items}}
  (folder / 'dataset_info.json').write_text(json.dumps(info))
