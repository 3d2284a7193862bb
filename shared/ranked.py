"""Messages in an order that producers choose: one that no consumer has read yet may be overtaken.

A stream gives messages out in the order of their entry ids. So what should come after a new message
and is still unread is taken out and appended behind it, in one script: no consumer sees a gap.
"""

from collections.abc import Iterable
from typing import Any, cast

from redis.asyncio import Redis

# A missing stream or consumer group has read nothing. Entries without a rank are never overtaken.
_PUBLISH = """
local stream, group = KEYS[1], ARGV[1]
local last_read = '0-0'
local groups = redis.pcall('XINFO', 'GROUPS', stream)
if not groups.err then
  for _, info in ipairs(groups) do
    local about = {}
    for i = 1, #info, 2 do about[info[i]] = info[i + 1] end
    if about['name'] == group then last_read = about['last-delivered-id'] end
  end
end
local first, queue = nil, {}
for i = 2, #ARGV, 2 do
  if first == nil or ARGV[i] < first then first = ARGV[i] end
  table.insert(queue, {rank = ARGV[i], body = ARGV[i + 1], place = #queue, old = ''})
end
for _, entry in ipairs(redis.call('XRANGE', stream, '(' .. last_read, '+')) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  if fields['rank'] and fields['rank'] > first then
    redis.call('XDEL', stream, entry[1])
    table.insert(
      queue, {rank = fields['rank'], body = fields['body'], place = #queue, old = entry[1]}
    )
  end
end
table.sort(queue, function(a, b)
  if a.rank ~= b.rank then return a.rank < b.rank end
  return a.place < b.place
end)
local told = {}
for _, one in ipairs(queue) do
  local id = redis.call('XADD', stream, '*', 'rank', one.rank, 'body', one.body)
  table.insert(told, {one.old, one.place, id})
end
return told
"""


async def publish_ranked(
    redis: Redis, stream: str, messages: Iterable[tuple[str, bytes]], *, group: str
) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Append messages of a rank each; those of lower rank, as text, are read first by `group`.

    Returns their entry ids, in the given order, and the new ids of messages that were overtaken. An
    answer lost on the way may append them twice.
    """
    given = list(messages)
    arguments = [part for message in given for part in message]
    told: Any = await cast(Any, redis.eval(_PUBLISH, 1, stream, group, *arguments))
    ids = {place: entry_id for old, place, entry_id in told if not old}
    moved = {old: entry_id for old, _, entry_id in told if old}
    return [ids[place] for place in range(len(given))], moved
