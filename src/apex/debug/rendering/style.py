"""The look of the page: light and dark, phone and desktop; colours stand for dtypes."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #f6f7f9; --card: #ffffff; --ink: #16191f; --soft: #5b6472; --line: #e2e5ea;
  --fp32: #3f6fd8; --fp64: #274a99; --fp16: #e08a12; --bf16: #12a07a; --mixed: #8a5bd0;
  --none: #b4bac4; --alarm: #d03a3a; --hover: #f0f2f6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #101318; --card: #181c23; --ink: #e9ecf1; --soft: #98a2b1; --line: #2a303a;
    --fp32: #6f9bff; --fp64: #9db8ff; --fp16: #f5ab45; --bf16: #35c79f; --mixed: #b28af0;
    --none: #565f6d; --alarm: #ff7070; --hover: #1f242d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 2.2rem 1.2rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1160px; margin: 0 auto; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.015em; }
h2 { font-size: 1.05rem; margin: 2.4rem 0 .8rem; letter-spacing: -.005em; }
.soft { color: var(--soft); }
code { font: .92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin-top: 1.4rem; }
.tile, .card {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
}
.tile { padding: .85rem 1rem .9rem; flex: 1 1 235px; }
.tile .name { font-size: .82rem; color: var(--soft); }
.tile .value { font-size: 1.5rem; font-weight: 650; letter-spacing: -.02em; line-height: 1.3; }
.tile .more { font-size: .82rem; color: var(--soft); line-height: 1.4; overflow-wrap: anywhere; }
.tile.alarm .value { color: var(--alarm); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: 0 0 .7rem; font-size: .85rem; }
.dot {
  display: inline-block; width: .7em; height: .7em; border-radius: 50%;
  background: var(--tone); margin-right: .4em; flex: none;
}
.fp32 { --tone: var(--fp32); } .fp64 { --tone: var(--fp64); } .fp16 { --tone: var(--fp16); }
.bf16 { --tone: var(--bf16); } .mixed { --tone: var(--mixed); } .none { --tone: var(--none); }
.tree { padding: .35rem 0; overflow: hidden; }
.tree details > :not(summary) { margin-left: 1.15rem; border-left: 1px solid var(--line); }
summary, .leaf {
  display: grid; align-items: center; gap: .2rem .9rem; padding: .3rem 1rem; cursor: pointer;
  grid-template-columns: minmax(0, 1fr) 190px 4.2rem 5.2rem 5.6rem; list-style: none;
}
summary::-webkit-details-marker { display: none; }
summary:hover { background: var(--hover); }
summary:focus-visible { outline: 2px solid var(--fp32); outline-offset: -2px; }
.label { display: flex; align-items: center; min-width: 0; }
.label::before {
  content: ""; flex: none; width: 0; height: 0; margin-right: .55em; color: var(--soft);
  border-left: .36em solid; border-block: .27em solid transparent; transition: rotate .12s;
}
details[open] > summary .label::before { rotate: 90deg; }
.label b { font-weight: 600; white-space: nowrap; }
.label .soft {
  margin-left: .6em; font-size: .85rem; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis;
}
.head { cursor: default; font-size: .78rem; color: var(--soft); padding-bottom: .1rem; }
.head .label::before { visibility: hidden; }
.bar {
  display: flex; height: .6rem; border-radius: 3px; overflow: hidden;
  background: color-mix(in srgb, var(--none) 22%, transparent);
}
.bar i { background: var(--tone); height: 100%; }
.right { text-align: right; font-size: .87rem; white-space: nowrap; }
.ops { padding: .15rem 0 .45rem; }
.op {
  display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 .8rem; padding: .16rem 1rem;
  font-size: .86rem;
}
.op .why { color: var(--soft); }
.way { color: var(--soft); width: 1em; flex: none; }
.type { color: var(--tone); font-weight: 600; white-space: nowrap; }
.alarm-text { color: var(--alarm); font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .83rem; }
th, td { padding: .42rem .6rem; text-align: left; white-space: nowrap; }
th { font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--line); }
tr + tr td { border-top: 1px solid color-mix(in srgb, var(--line) 60%, transparent); }
td.n, th.n { text-align: right; }
td:first-child, th:first-child { padding-left: 1rem; }
td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 10.5rem; }
.op-name { max-width: 11rem; overflow: hidden; text-overflow: ellipsis; }
tbody tr:hover { background: var(--hover); }
.notes { font-size: .88rem; color: var(--soft); margin-top: 1.6rem; }
.notes p { margin: .25rem 0; }
@media (max-width: 720px) {
  body { padding: 1.3rem .8rem 3rem; }
  .tiles { gap: .6rem; }
  .tile { padding: .7rem .8rem; flex-basis: 40%; }
  .tile .value { font-size: 1.2rem; }
  summary, .leaf { grid-template-columns: minmax(0, 1fr) 64px 3.6rem; padding-inline: .7rem; }
  .wide { display: none; }
  .tree details > :not(summary) { margin-left: .75rem; }
  .op { padding-inline: .7rem; }
  td:last-child { min-width: 17rem; }
}
"""
