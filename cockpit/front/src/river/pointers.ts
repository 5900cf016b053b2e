// What a pointer, two fingers or a wheel mean over the river.

export interface Pointer {
  x: number;
  y: number;
}

export interface Steering {
  hover: (pointer: Pointer | null) => void;
  drag: (pixels: number) => void;
  wheel: (event: WheelEvent, x: number) => void;
  pinch: (times: number, x: number) => void;
  open: (pointer: Pointer) => void;
}

const CLICK_PX = 4;

/** Listens until what it gives back is called; `ways` is asked at each event. */
export function steer(element: HTMLElement, ways: () => Steering): () => void {
  const down = new Map<number, Pointer>();
  let travelled = 0;
  const at = (event: MouseEvent): Pointer => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const begin = (event: PointerEvent): void => {
    if (event.button) return;
    down.set(event.pointerId, at(event));
    travelled = 0;
    element.setPointerCapture(event.pointerId);
  };
  const move = (event: PointerEvent): void => {
    const was = down.get(event.pointerId);
    const here = at(event);
    if (!was) return ways().hover(here);
    const others = [...down].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    down.set(event.pointerId, here);
    travelled += Math.abs(here.x - was.x) + Math.abs(here.y - was.y);
    const other = others[0];
    if (other) ways().pinch(Math.abs(here.x - other.x) / Math.max(1, Math.abs(was.x - other.x)), (here.x + other.x) / 2);
    else if (travelled > CLICK_PX) ways().drag(here.x - was.x);
  };
  const end = (event: PointerEvent): void => {
    if (!down.delete(event.pointerId) || event.type !== "pointerup" || travelled > CLICK_PX) return;
    if (event.pointerType === "touch") ways().hover(at(event));
    else ways().open(at(event));
  };
  const leave = (): void => ways().hover(null);
  const wheel = (event: WheelEvent): void => ways().wheel(event, at(event).x);
  element.addEventListener("pointerdown", begin);
  element.addEventListener("pointermove", move);
  element.addEventListener("pointerup", end);
  element.addEventListener("pointercancel", end);
  element.addEventListener("pointerleave", leave);
  element.addEventListener("wheel", wheel, { passive: false });
  return () => {
    element.removeEventListener("pointerdown", begin);
    element.removeEventListener("pointermove", move);
    element.removeEventListener("pointerup", end);
    element.removeEventListener("pointercancel", end);
    element.removeEventListener("pointerleave", leave);
    element.removeEventListener("wheel", wheel);
  };
}
