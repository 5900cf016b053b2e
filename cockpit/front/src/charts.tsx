// Curves by uPlot: made for a million points, drawn on a canvas in the theme's colours.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Numbers } from "./api";
import { SECONDS_STEPS, quantityText, tickTexts, type Quantity } from "./text";
import { colour } from "./colours";
import { useTheme } from "./theme";

export interface Curve {
  name: string;
  x: number[];
  y: Numbers;
  hue?: number;
  dashed?: boolean;
  filled?: boolean;
}

export interface ChartProps {
  label: string; // what is drawn, for those who do not see it
  curves: Curve[];
  x: Quantity;
  y: Quantity;
  xName: string;
  target?: number | null;
  stepped?: boolean;
  fromZero?: boolean;
  height?: number;
}

const HEIGHT = 240;
const MARGIN = 0.06;

/** Curves with x of their own on one common x, empty where one has no point. */
function aligned(curves: Curve[]): uPlot.AlignedData {
  if (curves.length === 1) return [curves[0]!.x, curves[0]!.y];
  if (curves.every((curve) => curve.x === curves[0]!.x)) return [curves[0]?.x ?? [], ...curves.map((curve) => curve.y)];
  return uPlot.join(curves.map((curve) => [curve.x, curve.y] as uPlot.AlignedData));
}

function axis(quantity: Quantity, size: number, grid: boolean): uPlot.Axis {
  return {
    stroke: colour("soft"),
    grid: { show: grid, stroke: colour("grid"), width: 1 },
    ticks: { show: false },
    border: { show: !grid, stroke: colour("line"), width: 1 },
    font: "11px system-ui, sans-serif",
    size,
    space: grid ? 36 : 70,
    gap: 6,
    ...(quantity === "seconds" ? { incrs: SECONDS_STEPS } : {}),
    values: (_, ticks) => tickTexts(ticks, quantity),
  };
}

function targetLine(target: number): (u: uPlot) => void {
  return (u) => {
    const y = u.valToPos(target, "y", true);
    const { left, top, width, height } = u.bbox;
    if (y < top || y > top + height) return;
    u.ctx.save();
    u.ctx.strokeStyle = colour("target");
    u.ctx.lineWidth = 1.5 * devicePixelRatio;
    u.ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    u.ctx.beginPath();
    u.ctx.moveTo(left, y);
    u.ctx.lineTo(left + width, y);
    u.ctx.stroke();
    u.ctx.restore();
  };
}

function range(props: ChartProps): uPlot.Range.Function {
  return (_, low, high) => {
    if (low === null || high === null) return [0, 1];
    let [from, to] = [low, high];
    if (props.target !== null && props.target !== undefined) [from, to] = [Math.min(from, props.target), Math.max(to, props.target)];
    if (props.fromZero) from = Math.min(0, from);
    if (from === 0 && to === 0) return [0, 1];
    const room = (to - from || Math.abs(to) || 1) * MARGIN;
    return [props.fromZero && from === 0 ? 0 : from - room, to + room];
  };
}

function options(props: ChartProps, width: number): uPlot.Options {
  const stepped = props.stepped ? uPlot.paths.stepped?.({ align: 1 }) : undefined;
  return {
    width,
    height: props.height ?? HEIGHT,
    padding: [10, 26, 0, 0],
    cursor: { points: { size: 7 }, drag: { x: true, y: false, uni: 10 }, focus: { prox: 24 } },
    focus: { alpha: 0.35 },
    legend: { live: true, markers: { width: 0 } },
    scales: { x: { time: false }, y: { range: range(props) } },
    axes: [axis(props.x, 34, false), axis(props.y, 62, true)],
    series: [
      { label: props.xName, value: (_, v) => quantityText(v, props.x) },
      ...props.curves.map((curve, i): uPlot.Series => {
        const stroke = colour(`c${(curve.hue ?? i) % 8}`);
        const few = curve.x.length <= 40;
        return {
          label: curve.name,
          stroke,
          width: 1.75,
          spanGaps: true,
          points: { show: few, size: 5, fill: stroke },
          value: (_, v) => quantityText(v, props.y),
          ...(curve.dashed ? { dash: [5, 3] } : {}),
          ...(curve.filled ? { fill: `${stroke}22` } : {}),
          ...(stepped ? { paths: stepped } : {}),
        };
      }),
    ],
    hooks: {
      draw: props.target !== null && props.target !== undefined ? [targetLine(props.target)] : [],
      ready: [newestLegend],
      setData: [newestLegend],
      setCursor: [(u) => u.cursor.idx === null && newestLegend(u)],
    },
  };
}

/** Nobody points at anything: the newest values stand under the chart. */
function newestLegend(u: uPlot): void {
  const last = u.data[0].length - 1;
  if (last >= 0) u.setLegend({ idxs: u.data.map((values, i) => (i ? values.findLastIndex((value) => value !== null && value !== undefined) : last)) });
}

function newest(curve: Curve, props: ChartProps): string {
  const at = curve.y.findLastIndex((value) => value !== null);
  return at < 0 ? `${curve.name}: nothing yet` : `${curve.name}: ${quantityText(curve.y[at], props.y)} at ${quantityText(curve.x[at], props.x)}`;
}

/** Drag over it to zoom in, double-click for the whole; the newest values stand under it for all readers. */
export function Chart(props: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const drawn = useRef<Curve[] | null>(null);
  const { colours } = useTheme();
  const shape = JSON.stringify([props.curves.map((c) => [c.name, c.hue, c.dashed, c.x.length <= 40]), props.x, props.y, props.xName, props.target, props.stepped, props.height]);
  useEffect(() => {
    const element = place.current!;
    const made = new uPlot(options(props, Math.max(120, element.clientWidth)), aligned(props.curves), element);
    plot.current = made;
    drawn.current = props.curves;
    const watch = new ResizeObserver(() => {
      if (Math.abs(element.clientWidth - made.width) > 1) made.setSize({ width: Math.max(120, element.clientWidth), height: props.height ?? HEIGHT });
    });
    watch.observe(element);
    return () => {
      watch.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape, colours]);
  useEffect(() => {
    const made = plot.current;
    const data = aligned(props.curves);
    if (!made || drawn.current === props.curves) return;
    drawn.current = props.curves;
    const old = made.data[0];
    const { min, max } = made.scales.x!;
    const known = typeof min === "number" && typeof max === "number" && old.length > 1;
    const zoomed = known && (min > old[0]! || max < old[old.length - 1]!);
    made.setData(data, !zoomed);
    if (zoomed) made.redraw();
  }, [props.curves]);
  const told = `${props.label}. ${props.curves.map((curve) => newest(curve, props)).join("; ")}.`;
  return (
    <figure class="chart" role="img" aria-label={told}>
      <div ref={place} aria-hidden="true" />
    </figure>
  );
}
