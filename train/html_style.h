#pragma once
#include <string_view>

namespace detr::train {

/// Style sheet of the report. c0 to c7 are the colours and d0 to d7 the dash patterns of curves; the colours are those of Okabe and
/// Ito ("Color Universal Design", 2008), which colour-blind readers tell apart, darker or lighter where the page asks for contrast.
constexpr std::string_view kReportStyle = R"css(
:root{color-scheme:light dark;--page:#fcfcfb;--ink:#1c1d1f;--soft:#5d6167;--rule:#d9dadc;--grid:#e6e7e9;--panel:#f3f4f4;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b5508c;--c4:#b07d00;--c5:#3d9ad1;--c6:#4a4d52;--c7:#7a4fb0;--on:#fff}
@media (prefers-color-scheme:dark){:root{--page:#16181b;--ink:#e4e5e7;--soft:#9ba0a7;--rule:#3a3d42;--grid:#2b2e33;--panel:#1f2226;
--c0:#56b4e9;--c1:#f0803c;--c2:#2fc79b;--c3:#e092c0;--c4:#e6a81e;--c5:#8fb8ff;--c6:#c3c6cb;--c7:#b798ec;--on:#101214}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 Charter,"Bitstream Charter","Sitka Text",Cambria,"Liberation Serif",serif}
main,header{max-width:1088px;margin:0 auto;padding:0 24px}
header{padding-top:44px}
h1{font-size:30px;line-height:1.2;margin:0;font-weight:600;letter-spacing:-.01em;overflow-wrap:anywhere}
header p{margin:6px 0 0;color:var(--soft)}
h2{font-size:21px;font-weight:600;margin:52px 0 4px;padding-top:14px;border-top:1px solid var(--rule)}
section>p{margin:0 0 12px;color:var(--soft);max-width:110ch}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));margin:28px 1px 8px 0;list-style:none;padding:0}
.cards li{border:1px solid var(--rule);margin:0 -1px -1px 0;padding:12px 16px}
.cards b{display:block;font-size:25px;font-weight:600;line-height:1.25;font-variant-numeric:tabular-nums}
.cards span,.cards small{display:block;font:12.5px/1.4 system-ui,"Liberation Sans",sans-serif;color:var(--soft)}
.figures{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:0 40px;align-items:start}
.figures figure{display:grid;grid-row:span 3;grid-template-rows:subgrid;margin:14px 0 18px}
.wide{grid-column:1/-1}
figure{margin:14px 0 0;min-width:0}
figcaption{font-size:14.5px;line-height:1.45;margin-bottom:4px;color:var(--soft)}
figcaption p{margin:0}
figcaption b{color:var(--ink);font-weight:600}
svg{display:block;width:100%;height:auto;font:12px system-ui,"Liberation Sans",sans-serif;font-variant-numeric:tabular-nums}
svg text{fill:var(--soft)}
svg .name{fill:var(--ink)}
svg .note{font-size:11.5px}
svg .in{fill:var(--ink)}
svg .on{fill:var(--on)}
svg .grid,svg .axis,svg .mark,svg .curve{fill:none}
svg .grid{stroke:var(--grid)}
svg .axis{stroke:var(--soft)}
svg .mark{stroke:var(--soft);stroke-dasharray:1 3}
svg .curve{stroke:currentColor;stroke-width:1.8;stroke-linejoin:round}
svg .faint .curve{stroke-width:1;stroke-dasharray:none;opacity:.5}
svg circle{fill:currentColor}
svg .bar{fill:currentColor}
svg .cell{fill:var(--c0)}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}
.d1 .curve{stroke-dasharray:7 3}.d2 .curve{stroke-dasharray:2.5 2.5}.d3 .curve{stroke-dasharray:9 3 2 3}.d4 .curve{stroke-dasharray:13 4}
.d5 .curve{stroke-dasharray:5 2 1 2 1 2}.d6 .curve{stroke-dasharray:1.5 4}.d7 .curve{stroke-dasharray:4 6}
.nested .c0.bar,.nested .c0 .bar{opacity:.3}.nested .c1{color:var(--c0)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 18px;margin:0;padding:0;font:12.5px/1.5 system-ui,"Liberation Sans",sans-serif;color:var(--ink)}
.legend li{display:flex;align-items:center;gap:7px;overflow-wrap:anywhere}
.legend .swatch{width:34px;height:12px;flex:none}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font:13px/1.45 system-ui,"Liberation Sans",sans-serif;font-variant-numeric:tabular-nums;margin:8px 0}
th,td{padding:3px 12px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{font-weight:600;border-bottom:1px solid var(--soft)}
th:first-child,td:first-child{padding-left:0}
th.t,td.t{text-align:left}
td.t{white-space:normal;overflow-wrap:anywhere;min-width:9ch}
details{margin-top:4px;font-size:13.5px;color:var(--soft)}
summary{cursor:pointer;font:12.5px/1.6 system-ui,"Liberation Sans",sans-serif}
details .scroll{max-height:420px;overflow-y:auto;color:var(--ink)}
.two{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:0 40px;align-items:start}
.pairs{display:grid;gap:26px;margin-top:16px}
.pairs figure{margin:0}
.pair{display:flex;gap:12px}
.pair div{min-width:0}
.pair img{display:block;max-width:100%;height:auto;background:var(--panel)}
.pair span{font:11.5px/1.7 system-ui,"Liberation Sans",sans-serif;color:var(--soft)}
.pairs figcaption{margin:4px 0 0;font-size:13px;overflow-wrap:anywhere}
pre{background:var(--panel);padding:12px 16px;overflow:auto;max-height:560px;font:12.5px/1.5 ui-monospace,"Liberation Mono",monospace;color:var(--ink)}
ol.warnings{font:13px/1.5 system-ui,"Liberation Sans",sans-serif;padding-left:2.2em;overflow-wrap:anywhere}
footer{height:60px}
@media (max-width:820px){.figures,.two{grid-template-columns:minmax(0,1fr)}main,header{padding-left:16px;padding-right:16px}}
@media (max-width:520px){svg{font-size:15px}svg .note{font-size:14px}h1{font-size:25px}}
@media print{h2,figure{break-inside:avoid;break-after:avoid}}
)css";

}  // namespace detr::train
