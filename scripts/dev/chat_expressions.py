"""Expressions and small templates whose values chat-vectors.py records."""

import itertools

MESSAGES = [{"role": "system", "content": " S "}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yo", "tool_calls": [{"name": "f", "arguments": {"b": 2, "a": [1, None]}}]}]

CONTEXT = {"n": 7, "x": 2.5, "s": "héLLo wörld", "e": "", "l": [3, 1, 2], "d": {"b": 1, "a": "x", "items": 5}, "t": True,
           "z": None, "deep": {"k": [{"v": 1}, {"v": 0}, {"w": 2}]}, "big": 9007199254740993, "words": ["b", "A", "c", "a"]}

# Evaluated as `{{ [EXPRESSION] | string }}`, so that the result is shown as Python's repr.
EXPRESSIONS = r"""
1 | 1_000 | 0x1F | 0b101 | 0o17 | 1.5 | 1e3 | 2.5e-7 | 1E+2 | 1_0.0_1 | '\1011\0' | 'a' 'b' "c" | '\n\t\\\'\"' | '\x41\u00e9\U0001F600\101\q' | "\
x" | '\é' | none | None | true | True | false | False | [] | [1,] | () | (1,) | (1, 2) | {} | {'a': 1, 'b': [2]} | {'a': 1, 'a': 2} | {1: 'x', none: 2, 1.5: 3, true: 4} | undefined_name
1e16 | 1e15 | 123456789012345680.0 | 1e22 | 1e-5 | 0.0001 | 1.0 | 100.0 | 5e-324 | 1.7976931348623157e308 | 0.1 + 0.2 | 1/3 | -0.0 | 1e999 | 1e16 // 3
n + 1 | n - 10 | n * 3 | n / 2 | n // 2 | -n // 2 | n % 3 | -n % 3 | n % -3 | -n % -3 | n // -2 | 7.5 // 2 | -7.5 // 2 | 7.5 % -2 | -7.5 % 2 | 4 / 2 | n / 0 | n // 0 | n % 0 | x / 0 | x // 0 | 6.0 % 3 | -6.0 % 3
true + 1 | true + true | -true | +true | not 1 | not '' | -n | +n | - -n | -'a' | 1 - -1 | 2 - 1 - 1 | 2 * 3 + 4 | 2 + 3 * 4 | (2 + 3) * 4 | 10 - 2 * 3 | 7 // 2 * 2 | 1 ~ 2 + 3 | 1 + 2 ~ 3 | 1 ~ 'a' ~ none ~ 1.0 ~ true | 1 ~ undefined_name | -1 ~ 2
'a' + 'b' | 'a' + 1 | 1 + 'a' | [1] + [2] | (1,) + (2,) | [1] + (2,) | 'a' + none | none + 'a' | undefined_name + 'a' | 'a' + undefined_name | 1 + undefined_name | {} + {} | 'ab' * 3 | 3 * 'ab' | 'a' * -1 | [1] * 2 | 2 * (1,) | 'a' * 'b' | 'a' * 1.5 | 'a' - 'b' | l + words
1 == 1.0 | 1 == true | '1' == 1 | none == false | none == undefined_name | undefined_name == other_undefined | [1, 2] == [1, 2] | [1] == (1,) | {'a': 1, 'b': 2} == {'b': 2, 'a': 1} | 'a' != 'b' | big == 9007199254740992.0 | big > 9007199254740992.0 | 1 < 2 < 3 | 1 < 3 < 2 | 3 > 2 >= 2 | 'a' < 'b' | 'Z' < 'a' | 'é' > 'z' | '𐀀' > '￿' | [1, 2] < [1, 3] | [1] < [1, 0] | (1, 2) <= (1, 2) | 1 < 'a' | none < 1 | [1] < 'a' | undefined_name < 1 | 1 < undefined_name | 1 == 1 == 1
1 in [1, 2] | 'a' in 'cat' | '' in 'x' | 'x' in d | 'a' in d | 1 in 'a' | 'a' in none | 'a' in undefined_name | undefined_name in [1] | undefined_name in 'a' | none in [none] | 2 not in l | [1] in [[1]] | [1] in d | 1.0 in l | 'b' in words | 'a' in 5 | n in range(8) | 'a' in d.keys() | not 1 in [1]
1 and 2 | 0 and 2 | 1 or 2 | 0 or '' | none or 'x' | not none and 1 | 1 if t else 2 | 1 if z else 2 | (1 if z) | 1 if z else 2 if z else 3 | 'a' if 'a' in d and d.a == 'x' | undefined_name or 'd' | t and l | e or z or 0
d.a | d['a'] | d.items is callable | d['items'] | d.missing | d.missing.more | d['x'] | d[1] | l[0] | l[-1] | l[5] | l['a'] | l.x | s[0] | s[1] | s[-1] | s[99] | z.x | z['x'] | z[0] | n.x | n[0] | undefined_name.x | undefined_name['x'] | undefined_name[0] | deep.k[0].v | deep['k'][2]['w'] | deep.k.0.v | d.get is defined | (1, 2)[1] | {'a': {'b': 1}}.a.b | d.__class__ | ''.__class__ | d.update | l[true] | {1: 2}[1] | {1: 2}[1.0] | {1: 2}[true] | d[[]] | 'abc'['x'] | messages[2].tool_calls[0].arguments.a[1]
l[1:] | l[:-1] | l[::-1] | l[0:2] | l[::2] | l[5:] | l[-2:] | l[:0] | s[1:4] | s[::-1] | s[-3:] | s[:99] | s[::2] | (1, 2, 3)[1:] | range(10)[2:8:3] | range(5)[::-1] | z[1:] | undefined_name[1:] | d[1:] | n[1:] | l[::0] | l['a':] | l[none:none] | e[1:] | l[2:0:-1] | l[-99:99] | words[1:][0] | l[99:0:-2] | range(6)[4:0:-2] | range(9)[::-3][1:] | words[-1:-9:-1] | s[10:2:-3] | l[:none:2] | l[3:3] | l[0:0:-1]
range(3) | range(1, 4) | range(0, 10, 3) | range(3, 0, -1) | range(0) | range(5) | range(1, 2, 0) | range('a') | range(200000) | range(3) is sequence | range(5)[1] | range(5)[-1] | range(3) == range(3) | range(2.0)
dict(a=1) | dict({'a': 1}, b=2) | dict([('a', 1)]) | dict() | namespace(a=1) | namespace({'a': 1}, b=2).b | namespace().x | namespace(_a=1) | namespace is callable | dict(1) | raise_exception('boo') | raise_exception(5) | strftime_now('%Y-%m-%d') | strftime_now('%d %B %Y, %H:%M:%S %j %a %%') | strftime_now('') | strftime_now('%-d %b')
'a-b-c'.split('-') | 'a-b-c'.split('-', 1) | 'a-b-c'.rsplit('-', 1) | ' a  b c '.split() | ' a  b c '.split(none, 1) | ' a  b c '.rsplit(none, 1) | 'a b'.split(maxsplit=0) | ''.split() | ''.split(',') | 'aXbXc'.split('X', maxsplit=1) | 'a'.split('') | '</think>x</think>y'.split('</think>')[-1] | 'x'.split('</think>')[0] | 'a,b,'.split(',') | 'a b'.split(sep=' ') | 'a\u2003b\x1cc'.split()
' a '.strip() | ' a '.lstrip() | ' a '.rstrip() | 'xxaxx'.strip('x') | 'xyaxy'.lstrip('yx') | '\n\na\n'.strip('\n') | '\u00a0a\u3000'.strip() | 'éaé'.strip('é') | 'a'.strip(1) | 'a'.strip(none) | '\x1f a \x85'.strip() | ''.strip() | 'a'.rstrip(none) | 'xa'.strip('')
'abc'.startswith('a') | 'abc'.startswith(('x', 'a')) | 'abc'.endswith('c') | 'abc'.endswith(('b', 'd')) | 'abc'.startswith('') | 'abc'.startswith('b', 1) | 'abc'.endswith('b', 0, 2) | 'abc'.startswith(1) | ''.startswith('a') | 'abc'.startswith('', 9)
'aXbX'.replace('X', 'y') | 'aXbX'.replace('X', 'y', 1) | 'abc'.replace('', '-') | 'é1'.replace('', '-', 2) | 'aaa'.replace('aa', 'b') | 'a'.replace('a', '<') | ('ab'|safe).replace('a', '<'|safe) | 'a'.replace('a', '<'|safe) | 'abc'.find('c') | 'héc'.find('c') | 'abc'.find('x') | 'abcabc'.find('c', 3) | 'abc'.rfind('c') | 'ééa'.index('a') | 'abc'.index('x') | 'banana'.count('an') | 'abc'.count('') | 'abc'.find('') | 'banana'.count('a', 2) | 'banana'.rfind('a', 0, 3) | 'a'.find('', 5)
'AbC'.lower() | 'AbC'.upper() | 'straße'.upper() | 'ÉCOLE İ'.lower() | 'ΑΣ ΣΑΣ'.lower() | 'hello wörld it\'s'.title() | 'hELLO wORLD'.capitalize() | 'ǆ'.capitalize() | 'ß'.title() | '1abc'.title() | 'a-b c_d'.title() | '-'.join(['a', 'b']) | ''.join([]) | ','.join('abc') | ','.join([1]) | ', '.join({'a': 1}) | ','.join(undefined_name) | 'a\nb\r\nc\n'.splitlines() | 'a\nb'.splitlines(true) | 'prefix-x'.removeprefix('prefix-') | 'a.txt'.removesuffix('.txt')
d.get('a') | d.get('q') | d.get('q', 5) | d.get('q', none) | d.keys() | d.values() | {'a': 1}.items() | d.keys()|list | d.values()|list | {'a': 1}.get('a', 2) | d.keys()|length | d.get([]) | {}.items() | l.copy() | d.copy() | d.copy is defined | l.index(1) | l.index(9) | l.count(3) | (1, 1).count(1) | l.append(4) | d.update({'a': 1}) | d.pop('a') | l.sort() | d.setdefault('z', 1) | l.reverse() | 'abc'.get('a') | d.strip() | z.get('a') | n() | 'a'() | undefined_name() | l[0]()
undefined_name|default('x') | z|default('x') | z|default('x', true) | e|default('x', boolean=true) | d.q|default(d.a) | undefined_name|d | undefined_name.a|default('x') | 0|default(5, true) | undefined_name|default | t|default(false)
d|dictsort | {'b': 1, 'A': 2, 'c': 0}|dictsort | {'b': 1, 'A': 2}|dictsort(true) | {'b': 1, 'a': 2}|dictsort(false, 'value') | {'b': 1, 'a': 2}|dictsort(reverse=true) | {'b': 1, 'a': 2}|dictsort(by='nope') | l|dictsort | {}|dictsort | {'a': 1, 'B': 'x'}|dictsort(by='value')
l|first | []|first | l|last | []|last | s|first | ''|last | d|first | undefined_name|first | undefined_name|last | n|first | z|last | words|map('upper')|first | range(3)|last | d|last | (1, 2)|last
'a\nb\n\nc'|indent | 'a\nb'|indent(2, true) | 'a\n\nb'|indent(2, blank=true) | 'a\nb'|indent('>') | 'a\nb\n'|indent(first=true) | ''|indent | 1|indent | undefined_name|indent | 'a\r\nb\x0bc'|indent(1)
'12'|int | ' -7 '|int | '1_000'|int | '1.9'|int | 'x'|int | 'x'|int(5) | '0x1f'|int(base=16) | 'ff'|int(0, 16) | 2.9|int | -2.9|int | none|int | true|int | []|int(3) | '1e3'|int | undefined_name|int | '+5'|int | ''|int | '1.5'|float | 'x'|float | 3|float | none|float(1.0) | -3|abs | -2.5|abs | 'a'|abs | 'inf'|int
{'a': 1}|items|list | undefined_name|items|list | l|items|list | ['a', 'b']|join | [1, none, 'x']|join(', ') | []|join('-') | 'abc'|join('-') | words|join(1) | deep.k|join(',', attribute='v') | [[1], {'a': 2}]|join(';') | d|join | undefined_name|join(',') | n|join | words|join(d=':')
l|length | s|length | d|length | undefined_name|length | n|length | z|length | '👩‍👩‍👧'|length | ''|count | (1, 2)|length | words|map('lower')|length | range(4)|length | {}|length
s|list | d|list | l|list | undefined_name|list | n|list | words|map('lower')|list | (1, 2)|list | ''|list | range(3)|list
'AbC É'|lower | 'abc é ß'|upper | 5|upper | none|lower | undefined_name|upper | 'hello world-foo (bar) [baz]'|title | 'ÉA ßb'|title | 'hELLO'|capitalize | ''|capitalize | 'ñandú X'|capitalize | 'élan'|title
deep.k|map(attribute='v')|list | deep.k|map(attribute='v', default=9)|list | [[1, 2], [3]]|map(attribute=0)|list | [{'a': {'b': 1}}]|map(attribute='a.b')|list | words|map('replace', 'a', 'z')|list | words|map('upper')|join | l|map('string')|list | [' a ']|map('trim')|list | words|map('nope')|list | l|map(attribute='x.y')|list | undefined_name|map('upper')|list | words|map('upper') is iterable | ['a']|map('default', 'b')|list | words|map()|list | none|map('upper')|list | 0|select|list | false|selectattr('a')|list | 1|map('upper')|list | '<b>'|safe|list | '<b>'|safe|first | ('<b>'|safe)[0]
'aXbX'|replace('X', 'y') | 'aXbX'|replace('X', 'y', 1) | 121|replace(1, 3) | none|replace('N', 'n') | undefined_name|replace('a', 'b') | 'a'|replace('', '-')
[1, 2, 3, 4]|select('odd')|list | [1, 2, 3, 4]|reject('odd')|list | [0, 1, '', 'a', none]|select|list | [0, 1]|reject|list | deep.k|selectattr('v')|list | deep.k|rejectattr('v')|list | deep.k|selectattr('v', 'defined')|list | deep.k|selectattr('v', 'equalto', 1)|list | deep.k|selectattr('v', '==', 0)|list | messages|selectattr('role', 'in', ['user', 'system'])|map(attribute='role')|list | [1, 'a']|select('string')|list | [1, 5, 9]|select('>', 4)|list | [1, 2]|select('nope')|list | messages|rejectattr('role', 'eq', 'user')|list|length | l|select('divisibleby', 3)|list | [none, 1]|reject('none')|list | l|selectattr|list
'<a>'|safe | '<a>'|safe + '<b>' | '<b>' + '<a>'|safe | ('<a>'|safe) ~ '<b>' | '&'|safe + '"\'' | none|safe | '<a>'|safe|upper | ('<'|safe)|trim + '<' | ('<a>'|safe).replace('a', '<') | '<a>'|safe|length | ('<a>'|safe)|string + '<' | '<x>'|safe == '<x>' | 'a' + ('b'|safe) + '<' + 'c' | '<a>'|safe|tojson | ('a'|safe) * 2 | ['<'|safe]|join + '<'
l|sort | words|sort | words|sort(case_sensitive=true) | l|sort(reverse=true) | deep.k[:2]|sort(attribute='v') | [1, 'a']|sort | []|sort | 'bca'|sort | [{'a': 1, 'b': 2}, {'a': 1, 'b': 1}]|sort(attribute='a,b') | undefined_name|sort | d|sort | [true, 0, 2]|sort | [[2], [1, 5]]|sort | ['b', 'B', 'a']|sort(true) | n|sort
1|string | 1.0|string | none|string | true|string | l|string | d|string | undefined_name|string | 'x'|string | ["it's", 'say "hi"', 'both \' and "', 'tab\t\n\\', '\x00\x7f\x85\u200b\u2028é', '😀\U000e0001']|string | {'a': (1,), 'b': none}|string | ('a',)|string | {'a': {'b': {}}}|string | [undefined_name] | ['<'|safe]
1|tojson | 1.0|tojson | 1e16|tojson | 1e-7|tojson | none|tojson | true|tojson | 'a"b\\/\n\t\r\b\f\x01\x7f é 😀 <>&\''|tojson | l|tojson | d|tojson | {}|tojson | []|tojson | (1, 2)|tojson | {'a': [], 'b': {}}|tojson(indent=2) | deep|tojson(indent=1) | l|tojson(indent=0) | d|tojson(separators=(',', ':')) | d|tojson(sort_keys=true) | 'é😀'|tojson(ensure_ascii=true) | {1: 2, none: 3, true: 4, 1.5: 5}|tojson | {(1, 2): 3}|tojson | undefined_name|tojson | [undefined_name]|tojson | range(2)|tojson | d.keys()|tojson | d|tojson(indent='  ') | d|tojson(indent=4, separators=(', ', ' : ')) | deep|tojson(false, 2) | namespace(a=1)|tojson | {'b': 1, 2: 3}|tojson(sort_keys=true) | [-0.0, 1e999]|tojson | dict(b=[{'x': none}], a=t)|tojson(indent=2, sort_keys=true)
' a '|trim | 'xax'|trim('x') | 5|trim | none|trim | undefined_name|trim | '\u2003a\n'|trim | 'a'|trim(none)
[1, 1.0, true, 2]|unique|list | words|unique|list | ['a', 'A']|unique(true)|list | deep.k|unique(attribute='v')|list | [[1]]|unique|list | undefined_name|unique|list | 'abca'|unique|join | l|reverse|list | 'aéb'|reverse | d|reverse|list | (1, 2)|reverse|list
t is boolean | 1 is boolean | n is defined | undefined_name is defined | undefined_name is undefined | d.q is defined | d.q is not defined | t is true | 1 is true | false is false | 0 is false | 1 is equalto 1.0 | 1 is eq 2 | 1 is ne 2 | 1 is lt 2 | 2 is ge 2 | 3 is gt 2 | 1 is in [1] | 1 is in(l) | 'a' is in 'abc' | n is integer | t is integer | x is integer | x is float | n is float | s is iterable | l is iterable | n is iterable | z is iterable | d is iterable | undefined_name is iterable | d is mapping | l is mapping | z is none | undefined_name is none | 0 is none | n is number | t is number | x is number | 'a' is number | s is sequence | l is sequence | d is sequence | n is sequence | d.keys() is sequence | undefined_name is sequence | s is string | n is string | 7 is odd | 7 is even | -3 is odd | 0 is even | 'a' is odd | undefined_name is odd | 9 is divisibleby 3 | 9 is divisibleby(2) | 1 is divisibleby 0 | n is not none | not n is none | n is defined and n is number | n is not string or z | d.get is callable | n is callable | range is callable | 'abc' is lower | 'ABC' is upper | 'a1' is lower | '1' is upper | namespace() is mapping | none is defined | 2.0 is even | 1 is lt 'a' | tools is defined | documents is none | add_generation_prompt is false
n|string|length + 1 | (n|string)|length | -n|abs | s.split(' ')[0]|upper | not t|string | 'a' if t else 'b'|upper | l|first + 1 | [1, 2][0] + [3][0] | {'a': [1]}['a'][0] | ('x' ~ 'y')|upper | 'x' ~ 'y'|upper | d.a.upper() | (s|upper)[0] | l|sort|first | s|replace('l', 'L')|length | messages[0].content|trim | messages[0]['content'].strip() | messages|length - 1 | messages[-1].tool_calls is defined | messages[1:]|length | messages[-1]['tool_calls'][0]['arguments']|tojson | n > 5 and n < 10 | n in [1, 7] or false | 'Hi' in messages[1].content | messages[1]
dict(**{'a': 1}) | dict(*[[('a', 1)]], b=2) | range(*l[1:]) | namespace(a=1, **{'b': 2}).b | s.replace(*['l', 'L'])
"""

# These fail with words of our own.
FAILING = r"""
'a'.replace('a', 1) | d.get() | d.missing() | d.get('a', 1, 2) | d.get(key='a') | '%s<'|safe + 1 | dict(**l) | dict(a=1, **{'a': 2}) | 'abc'.strip('a', 'b') | 'a'.join() | range() | range(1, 2, 3, 4) | l|join(1, 2, 3) | 'a'|upper(1) | l|length(2) | 1 is odd(3) | 'a'.split(1) | raise_exception() | strftime_now()
"""

# Whole templates, separated by lines of dashes.
TEMPLATES = r"""
{% for i in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.depth }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}
-----
{% for i in l if i > 1 %}{{ i }}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.nextitem is defined }};{% else %}none{% endfor %}
-----
{% for i in [] %}x{% else %}empty{% endfor %}{% for i in l if i > 5 %}x{% else %}empty{% endfor %}
-----
{% for a, b in [(1, 2), (3, 4)] %}{{ a }}-{{ b }};{% endfor %}{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for (a, (b, c)) in [(1, (2, 3))] %}{{ a + b + c }}{% endfor %}
-----
{% for a, b in [(1, 2, 3)] %}{% endfor %}
-----
{% for a, b in [(1,)] %}{% endfor %}
-----
{% for i in 5 %}{% endfor %}
-----
{% for k in d %}{{ k }}{% endfor %}{% for c in 'héy' %}[{{ c }}]{% endfor %}{% for i in undefined_name %}x{% endfor %}{% for i in none_value %}{% endfor %}
-----
{% for i in none %}{% endfor %}
-----
{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }},{% endfor %}{{ x }}
-----
{% set ns = namespace(x=1) %}{% for i in l %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns }}
-----
{% set q.x = 1 %}
-----
{% set ns = namespace() %}{% set ns._x = 1 %}
-----
{% if t %}{% set y = 1 %}{% else %}{% set y = 2 %}{% endif %}{{ y }}{% if not t %}{% set w = 1 %}{% endif %}{{ w is defined }}
-----
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set c = 1, 2 %}{{ c }}{% set (d1, d2) = 'xy' %}{{ d2 }}
-----
{% set v %}a{{ n }}
  b{% endset %}[{{ v }}]{% set v | upper | replace('A', '-') %}abc{% endset %}{{ v }}
-----
{% set a = 1 %}{% set v %}{% set a = 2 %}{{ a }}{% endset %}{{ v }}{{ a }}
-----
{% macro m(a, b=2, c=a) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(1, c=5) }}{{ m(b=1, a=4) }}{{ m() }}
-----
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
-----
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(q=2) }}
-----
{% macro m(a) %}{{ a.x }}{% endmacro %}{{ m() }}
-----
{% macro fact(k) %}{% if k > 1 %}{{ k * (fact(k - 1) | int) }}{% else %}1{% endif %}{% endmacro %}{{ fact(5) }}{{ fact(3) + '!' }}{{ fact(4)|length }}
-----
{% for i in l %}{% macro m() %}{{ i }}{{ loop.index }}{% endmacro %}{{ m() }}{% endfor %}
-----
{% macro m() %}{{ loop is defined }}{% endmacro %}{% for i in l %}{{ m() }}{% endfor %}
-----
{% macro m() %}{{ later }}{% endmacro %}{% set later = 5 %}{{ m() }}
-----
{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}
-----
{% for i in [1, 2] %}{% for j in [1, 2, 3] %}{% if j == 2 %}{% break %}{% endif %}{{ i }}{{ j }}{{ loop.index }} {% endfor %}{{ loop.index }}{% else %}no{% endfor %}
-----
{% for m in messages %}{% if loop.previtem and loop.previtem.role == 'user' %}after user {% endif %}{{ m.role }}{{ loop.nextitem.role if not loop.last }} {% endfor %}
-----
{% raw %}{{ not }} {% if %}{# c #}{% endraw %}|{%- raw -%}  x  {%- endraw -%}  |
-----
a{# comment #}b{#- c -#}  d  {#+ c +#} e
  {# line #}
f
-----
  {% if t %}
  yes
  {% endif %}
  no {{ n }}
	{%+ if t %} kept{% endif %}
end
-----
a  {%- if t -%}  b  {%- endif -%}  c  {{- n -}}  d
 {{ n }}
{{ n -}}
  e
-----
{%- if t %}
x
{%- endif +%}
y
-----
{% if z %}1{% elif e %}2{% elif n > 5 %}3{% else %}4{% endif %}{% if z: %}a{% endif %}
-----
{{ {'a': {'b': 1}}['a']['b'] }}{{ {'x': "}}"}['x'] }}{{ '{%' }}{{ "%}" }}
-----
{{ 1, 2 }}{{ (1,) }}{{ n }}{{ none }}{{ t }}{{ x }}{{ undefined_name }}{{ l }}{{ d }}
-----
{{ 'a' + 'b' + n|string + 'c' }}{{ 1 + 2 + 3 }}{{ [1] + [2] }}{{ 'x' ~ 1 + 2 ~ 'y' }}{{ ('<'|safe) + '<' + '>' }}{{ '<' + '>'|safe + '&' }}
-----
{{ 'a' + 'b' + 3 }}
-----
{{ 1 + 2 + 'a' }}
-----
{% generation %}a{{ n }}{% set inner = 1 %}{% endgeneration %}{{ inner is defined }}{%- generation -%}  b  {%- endgeneration -%}
-----
{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}
-----
{% set g = words|map('upper') %}{{ g is iterable }}{{ true if g }}{{ g|list }}{{ g|list }}
-----
{% set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate: ' + message.role) }}{% endif %}{{ message.content }}{% endfor %}{{ raise_exception("done") }}
-----
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ (messages | rejectattr('tool_calls', 'defined') | list)[0].role }}{{ messages | map(attribute='role') | join(',') }}
-----
{{ x | nope }}
-----
{{ x is nope }}
-----
{% if %}
-----
{% for i in l %}
-----
{{ (1 }}
-----
{{ 'abc }}
-----
{{ 1 is none is none }}
-----
{% break %}
-----
{% endif %}
-----
{{ x y }}
-----
{# open
-----
{{ a.b.c(d=1, 2) }}
-----
{% set true = 1 %}
-----
{{ {% }}
-----
line one
{% if t -%}
   trimmed
{%- endif %}

last line

-----
{%- set ns = namespace(found=false, items=[]) -%}{%- for i in l -%}{%- if i == 1 -%}{%- set ns.found = true -%}{%- set ns.items = ns.items + [i] -%}{%- endif -%}{%- endfor -%}{{ ns.found }}{{ ns.items }}{{ ns.nope }}{{ ns.nope is defined }}
-----
{% set messages = messages[:1] %}{{ messages|length }}{% set n = n + 1 %}{{ n }}{% macro m() %}{{ n }}{% endmacro %}{{ m() }}
-----
{% set d2 = dict(d, c=3) %}{{ d2 }}{{ d }}{% set ns = namespace(**d2) %}{{ ns.c }}
"""


def templates():
    """Triples (source, context, True if the text of an error is ours)."""
    for source, context in same_errors():
        yield source, context, False
    for expression in split_expressions(FAILING.strip()):
        yield "{{ " + expression + " }}", CONTEXT, True


def same_errors():
    """Pairs (source, context)."""
    for line in EXPRESSIONS.strip().replace("\\\n", "\\\0").split("\n"):
        for expression in split_expressions(line.replace("\0", "\n")):
            yield "{{ [" + expression + "] | string }}", CONTEXT
    for source in TEMPLATES.strip("\n").split("\n-----\n"):
        yield source, CONTEXT
    newlines = ["a\r\n{% if t %}\r\nb\r{% endif %}\n", "x\n\n", "x\n", "\n", "", "{{ n }}\n", "{{ n }}\n\n"]
    yield from ((source, CONTEXT) for source in newlines)
    values = ["1", "'a'", "none", "[1]", "{'k': 1}", "1.5", "undefined_name"]
    for left, sign, right in itertools.product(values, ["+", "-", "*", "==", "<", "in", "~", "and"], values):
        yield f"{{{{ [{left} {sign} {right}] | string }}}}", {}


def split_expressions(line):
    """The parts between " | ", which an expression does not contain: filters are written without spaces."""
    return [part for part in line.split(" | ") if part]
